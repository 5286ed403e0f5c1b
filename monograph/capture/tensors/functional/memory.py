"""The memory of a recorded step: which values show it, and the views from the whole of it to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.moving import value_of
from monograph.capture.tensors.functional.pure_forms import TAKEN_ANEW
from monograph.compat.fakes import has_symbols
from monograph.compat.ops import writes_to_inputs
from monograph.compat.tensors import may_overlap
from monograph.ir.memory import base_of, is_view
from monograph.layout import Layout, fills_a_block


@dataclass(eq=False)
class Memory:
    """One piece of memory: the value that is the whole of it, and the views."""

    root: fx.Node
    views: list[fx.Node] = field(default_factory=list)

    @cached_property
    def is_plain(self) -> bool:
        """True for one block of plain numbers, beginning with the first, whose views can all be turned round."""
        whole: Any = self.root.meta.get("val")
        return (
            isinstance(whole, torch.Tensor)
            and is_plain(whole)
            and not whole.is_complex()
            and whole.storage_offset() == 0
            and (whole.numel() == 0 or fills_a_block(whole.shape, whole.stride()))
            and all(view.target in TAKEN_ANEW and len(view.all_input_nodes) == 1 for view in self.views)
        )

    @property
    def is_piece(self) -> bool:
        """True for plain numbers with others between them, which torch says are on memory of their own.

        Results of `unsafe_split`: nobody reads what they were taken from any more.
        """
        whole: Any = self.root.meta.get("val")
        return (
            _is_piece(self.root)
            and isinstance(whole, torch.Tensor)
            and is_plain(whole)
            and not whole.is_complex()
            and whole.numel() > 0
            and not may_overlap(whole.shape, whole.stride())
            and all(view.target in TAKEN_ANEW and len(view.all_input_nodes) == 1 for view in self.views)
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor of known sizes whose elements are what is in memory."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return not has_symbols(tensor)


def is_ambiguous(value: object) -> bool:
    """True for a tensor that is contiguous and channels-last, whose strides decide which of torch's kernels runs."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return Layout(tuple(map(value_of, value.shape)), tuple(map(value_of, value.stride()))).is_ambiguous


class Memories:
    """Whose memory the values of a recorded step show."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, Memory] = {}
        self._values: dict[fx.Node, fx.Node] = {}
        self._bases: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            base = base_of(node) or _silent_base(node)
            if base is None:
                self.of[node], self._values[node] = Memory(node), node
                continue
            self.of[node] = memory = self.of[base]
            if writes_to_inputs(node.target):
                self._values[node] = self._values[base]
            else:
                self._values[node], self._bases[node] = node, self._values[base]
                memory.views.append(node)

    def value_of(self, node: fx.Node) -> fx.Node:
        """The value itself; of what an op in place gives back the value that it has written."""
        return self._values[node]

    def base_of(self, view: fx.Node) -> fx.Node:
        """What a view is taken from."""
        return self._bases[view]

    def views_to(self, node: fx.Node) -> list[fx.Node]:
        """The views between the whole memory and a value, the latter last."""
        chain: list[fx.Node] = []
        node = self._values[node]
        while node in self._bases:
            chain.append(node)
            node = self._bases[node]
        return chain[::-1]


def _is_piece(node: fx.Node) -> bool:
    """True for one of several results that are views, though their op does not say so."""
    source = node.args[0] if node.target is getitem else None
    return (
        isinstance(source, fx.Node) and source.op == "call_function" and not base_of(node) and is_view(source)
    )


def _silent_base(node: fx.Node) -> fx.Node | None:
    """What a view is taken from whose schema keeps silent about it, as that of `_unsafe_view`; none for `unsafe_split`."""
    if node.op != "call_function" or not is_view(node) or isinstance(node.meta.get("val"), (list, tuple)):
        return None
    return node.all_input_nodes[0]
