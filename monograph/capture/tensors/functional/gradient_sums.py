"""Where autograd adds the gradients of several uses of a value in place.

It does so, out of sight, if nobody else has the first gradient any more; under a trace it never does. The numbers are the
same, and the layout is not always: a sum in place keeps the strides of the first gradient. Kernels of convolutions and of
BatchNorm choose by them (`Layout.is_ambiguous`). Whether anybody else has a gradient is known once the step is recorded; then
it is recorded again, with these sums laid out so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from monograph.capture.tensors.functional.memory import is_ambiguous
from monograph.capture.tensors.readings import UNKNOWN
from monograph.compat.autograd import adding_node
from monograph.compat.traces.nodes import traced_node
from monograph.ir.memory import MemoryRoots
from monograph.ir.ops.laid_out import LAID_OUT

ADD = torch.ops.aten.add.Tensor


class GradientSums:
    """The sums of gradients that autograd makes in a trace, in order; those of `in_place` are laid out as the first gradient."""

    def __init__(self, in_place: Collection[int] = ()) -> None:
        self._in_place = in_place
        # with each the node of backward that may have added itself
        self._made: list[tuple[fx.Node | None, int]] = []

    def answer(
        self, tracer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of `ADD` where autograd calls it, UNKNOWN elsewhere. To be called by what is given each op."""
        number = None if kwargs else adding_node()
        if number is None:
            return UNKNOWN
        made = run(ADD, args, {})
        in_place = len(self._made) in self._in_place
        self._made.append((traced_node(made, tracer), number))
        return run(LAID_OUT, (made, args[0]), {}) if in_place else made

    def in_place(self, graph: fx.Graph, makers: Mapping[fx.Node, int]) -> frozenset[int]:
        """The sums that eager mode makes in place, of gradients where that decides how the sum is laid out.

        `makers` has the numbers of the nodes of backward that made values. What one makes itself, it may also add itself.
        """
        order = {node: position for position, node in enumerate(graph.nodes)}
        sums = {
            index: node
            for index, (node, number) in enumerate(self._made)
            if node is not None and node in order and _is_of_autograd(node, number, makers)
        }
        if not sums:
            return frozenset()
        roots, last = MemoryRoots(), dict[fx.Node, int]()
        for node, position in order.items():
            for item in node.all_input_nodes:
                last[roots.of(item)] = position

        def is_free(node: fx.Node) -> bool:
            first, second = (roots.of(item) for item in node.all_input_nodes)
            return first.op == "call_function" and first is not second and last[first] == order[node]

        return frozenset(index for index, node in sums.items() if is_free(node))


def _is_of_autograd(node: fx.Node, number: int, makers: Mapping[fx.Node, int]) -> bool:
    given = node.all_input_nodes
    return len(given) == 2 and is_ambiguous(given[0].meta.get("val")) and makers.get(given[0]) != number
