"""How a recurrent layer is written for compiled code: products over all steps, and the loop between them as one op."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.ir.meta import form
from monograph.ir.own_ops import RECURRENCE, RECURRENCE_BACKWARD
from monograph.layout import Layout
from monograph.native import Recurrence
from monograph.native.recurrent import GATES
from monograph.sizes.size import varies

aten = torch.ops.aten
Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class Layer:
    """One direction of a layer: nodes of what it is given, and its sizes."""

    kind: str  # of `GATES`
    reverse: bool
    x: fx.Node  # steps, rows, numbers
    weights: tuple[fx.Node, fx.Node]
    biases: tuple[fx.Node, fx.Node] | None
    first: fx.Node
    cells: fx.Node | None
    sizes: tuple[int, int, int, int]  # steps, rows, numbers of the input, units

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: for sizes that do not vary."""
        if varies(self.sizes):
            return False
        return self.forward_code.can_be_made and self.backward_code.can_be_made

    @property
    def forward_code(self) -> Recurrence:
        """The code of its loop."""
        steps, rows, _, units = self.sizes
        wide, state = units * GATES[self.kind], Layout.contiguous(rows, units)
        other = {"lstm": [state], "gru": [Layout.contiguous(wide)]}.get(self.kind, [])
        given = [Layout.contiguous(steps, rows, wide), Layout.contiguous(wide, units), state, *other]
        return Recurrence.of(given, [self.kind, self.reverse], 1)

    @property
    def backward_code(self) -> Recurrence:
        """The code of the gradients of its loop."""
        steps, rows, _, units = self.sizes
        state, weight = Layout.contiguous(rows, units), Layout.contiguous(units * GATES[self.kind], units)
        grad, block = Layout.contiguous(steps, rows, units), self.forward_code.results[0]
        cells, first = [state] * (self.kind == "lstm"), [state] * (self.kind in ("lstm", "gru"))
        given = [grad, state, *cells, weight, *first, block]
        return Recurrence.of_gradient(given, [self.kind, self.reverse], 1)

    def forward(self, call: Call) -> fx.Node:
        """The block of its loop."""
        steps, rows, _, units = self.sizes
        wide = units * GATES[self.kind]
        x, weight = self._rows(call, self.x), call(aten.t.default, self.weights[0])
        other = self.cells
        if self.biases is None:
            given = call(aten.mm.default, x, weight)
            if self.kind == "gru":
                other = _zeros(call, wide)
        else:
            of_input, of_state = self.biases
            if self.kind == "gru":
                other = of_state
            else:
                of_input = call(aten.add.Tensor, of_input, of_state)
            given = call(aten.addmm.default, of_input, x, weight)
        given = call(aten.view.default, given, [steps, rows, wide])
        return call(RECURRENCE, given, self.weights[1], self.first, other, self.kind, self.reverse)

    def part(self, call: Call, block: fx.Node, name: str) -> fx.Node:
        """A tensor of the block of its loop, or of its gradients."""
        parts = (self.forward_code if block.target is RECURRENCE else self.backward_code).parts
        start = 0
        for other, shape in parts.items():
            end = start + math.prod(shape)
            if other == name:
                return call(aten.view.default, call(aten.slice.Tensor, block, 0, start, end), [*shape])
            start = end
        raise KeyError(name)

    def last(self, call: Call, block: fx.Node, name: str) -> fx.Node:
        """The state or the cells after the last step, in memory of its own."""
        place = 0 if self.reverse else self.sizes[0] - 1
        return call(aten.clone.default, call(aten.select.int, self.part(call, block, name), 0, place))

    def backward(self, call: Call, block: fx.Node, grads: tuple[Any, Any, Any]) -> fx.Node:
        """The block of the gradients, from those of the states, of the last one and of the last cells, where there are any."""
        steps, rows, _, units = self.sizes
        sizes = ([steps, rows, units], [rows, units], [rows, units])
        states, last, cells = (
            _zeros(call, *size) if grad is None else grad for grad, size in zip(grads, sizes, strict=True)
        )
        first = {"lstm": self.cells, "gru": self.first}.get(self.kind)
        cells = cells if self.kind == "lstm" else None
        return call(
            RECURRENCE_BACKWARD, states, last, cells, self.weights[1], first, block, self.kind, self.reverse
        )

    def of_x(self, call: Call, made: fx.Node) -> fx.Node:
        """The gradient of the input."""
        product = call(aten.mm.default, self._flat(call, made, "of_input"), self.weights[0])
        return call(aten.view.default, product, [*self.sizes[:3]])

    def of_weight(self, call: Call, made: fx.Node, block: fx.Node, place: int) -> fx.Node:
        """The gradient of a weight: of that of the input, or of that of the state."""
        grad = self._flat(call, made, self._summed(place))
        with_ = self._rows(call, self.x) if place == 0 else self._before(call, block)
        return call(aten.mm.default, call(aten.t.default, grad), with_)

    def of_bias(self, call: Call, made: fx.Node, place: int) -> fx.Node:
        """The gradient of a bias."""
        return call(aten.sum.dim_IntList, self._flat(call, made, self._summed(place)), [0])

    def _summed(self, place: int) -> str:
        return "of_products" if self.kind == "gru" and place else "of_input"

    def _flat(self, call: Call, block: fx.Node, name: str) -> fx.Node:
        steps, rows, _, units = self.sizes
        part = self.part(call, block, name)
        return call(aten.view.default, part, [steps * rows, units * GATES[self.kind]])

    def _rows(self, call: Call, x: fx.Node) -> fx.Node:
        steps, rows, numbers, _ = self.sizes
        described = form(x)
        if described is None or not described.layout.is_like(Layout.contiguous(steps, rows, numbers)):
            x = call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return call(aten.view.default, x, [steps * rows, numbers])

    def _before(self, call: Call, block: fx.Node) -> fx.Node:
        """The states before all steps, as rows."""
        steps, rows, _, units = self.sizes
        states = self.part(call, block, "states")
        first = call(aten.unsqueeze.default, self.first, 0)
        kept = call(aten.slice.Tensor, states, 0, *((1, steps) if self.reverse else (0, steps - 1)))
        before = call(aten.cat.default, [kept, first] if self.reverse else [first, kept])
        return call(aten.view.default, before, [steps * rows, units])


def _zeros(call: Call, *size: int) -> fx.Node:
    return call(aten.full.default, [*size], 0.0, dtype=torch.float32, device=torch.device("cpu"))
