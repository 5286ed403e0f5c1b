"""Recurrent layers that torch unrolls, one op each in the program, as products and loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from monograph.ir.meta import form
from monograph.ir.ops.unrolled import UNROLLED_LAYER, UNROLLED_LAYER_BACKWARD
from monograph.passes.inductor.recurrence import Layer
from monograph.passes.inductor.rewrite import calls_like, put_results

aten = torch.ops.aten
UNROLLED = (UNROLLED_LAYER, UNROLLED_LAYER_BACKWARD)
Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class _Ways:
    """The directions of a layer, and the blocks of their loops."""

    layers: tuple[Layer, ...]
    blocks: tuple[fx.Node, ...]
    has_biases: bool

    def states(self, call: Call) -> fx.Node:
        """All states, those of both directions side by side."""
        pairs = zip(self.layers, self.blocks, strict=True)
        return self._beside(call, [layer.part(call, block, "states") for layer, block in pairs])

    def last(self, call: Call) -> fx.Node:
        """The last state of each direction."""
        pairs = zip(self.layers, self.blocks, strict=True)
        return call(aten.stack.default, [layer.last(call, block, "states") for layer, block in pairs])

    def gradients(self, call: Call, of_states: Any, of_last: Any) -> list[Callable[[], fx.Node]]:
        """What makes the gradient of the input, of the first states, and of each weight, from those of what the layer gave."""
        made = []
        for way, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            start = way * layer.sizes[3]
            states, last = of_states, of_last
            if states is not None and len(self.layers) > 1:
                states = call(aten.slice.Tensor, states, 2, start, start + layer.sizes[3])
            if last is not None:
                last = call(aten.select.int, last, 0, way)
            made.append(layer.backward(call, block, (states, last, None)))

        def of_x() -> fx.Node:
            found = [layer.of_x(call, grad) for layer, grad in zip(self.layers, made, strict=True)]
            return call(aten.add.Tensor, *found) if len(found) > 1 else found[0]

        def of_first() -> fx.Node:
            pairs = zip(self.layers, made, strict=True)
            return call(aten.stack.default, [layer.part(call, grad, "of_first") for layer, grad in pairs])

        found: list[Callable[[], fx.Node]] = [of_x, of_first]
        for layer, block, grad in zip(self.layers, self.blocks, made, strict=True):
            found += [partial(layer.of_weight, call, grad, block, place) for place in range(2)]
            if self.has_biases:
                found += [partial(layer.of_bias, call, grad, place) for place in range(2)]
        return found

    @staticmethod
    def _beside(call: Call, parts: list[fx.Node]) -> fx.Node:
        return call(aten.cat.default, parts, 2) if len(parts) > 1 else parts[0]


def write_unrolled(graph: fx.Graph) -> None:
    """Write each layer that torch unrolls, and its backwards, as products and loops, where there is code for it."""
    made: dict[Any, _Ways | None] = {}
    for node in [item for item in graph.nodes if item.target in UNROLLED]:
        is_forward = node.target is UNROLLED_LAYER
        x, first, weights, kind, both_ways = node.args[:5] if is_forward else node.args[2:7]
        key = (x, first, tuple(weights), kind, both_ways)
        with graph.inserting_before(node):
            call = calls_like(node)
            if key not in made:
                made[key] = _ways(call, *key)
            ways = made[key]
            if ways is None:
                continue
            if is_forward:
                put_results(node, {0: partial(ways.states, call), 1: partial(ways.last, call)})
            else:
                found = ways.gradients(call, *node.args[:2])
                asked = [item for item, is_wanted in zip(found, node.args[7], strict=True) if is_wanted]
                put_results(node, dict(enumerate(asked)))
        graph.erase_node(node)


def _ways(
    call: Call, x: fx.Node, first: fx.Node, weights: tuple[fx.Node, ...], kind: str, both_ways: bool
) -> _Ways | None:
    """The directions of a layer; None if there is no code for it."""
    described, states = form(x), form(first)
    assert described is not None
    assert states is not None
    count = len(weights) // (1 + both_ways)
    steps, rows, numbers = described.shape
    layers = []
    for way in range(1 + both_ways):
        of_input, of_state, *biases = weights[way * count : (way + 1) * count]
        layer = Layer(
            kind,
            way == 1,
            x,
            (of_input, of_state),
            (biases[0], biases[1]) if biases else None,
            first,
            None,
            (steps, rows, numbers, states.shape[2]),
        )
        if not layer.can_be_made:
            return None
        layers.append(replace(layer, first=call(aten.select.int, first, 0, way)))
    return _Ways(tuple(layers), tuple(layer.forward(call) for layer in layers), count == 4)
