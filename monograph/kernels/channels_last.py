"""Channels-last images: convolutions that run fastest on them get them, and what stands between keeps the layout."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.ir.evaluate import computed
from monograph.ir.meta import TensorMeta, form, origin, set_origin, set_value, value
from monograph.ir.program import Program
from monograph.layout import Layout
from monograph.passes.effects import acts

aten = torch.ops.aten
CONVOLVED = {
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
}  # the images among the inputs
_CONTIGUOUS, _LAST = torch.contiguous_format, torch.channels_last


class _CannotLie(Exception):
    """Something needs a layout that a copy does not give."""


def channels_last(program: Program) -> Program:
    """The program with its images channels-last from the first convolution on; results keep their layout.

    A program that convolves no images, or that needs layouts which cannot be kept, comes back itself.
    """
    if not any(_convolves(node) for node in program.graph.nodes):
        return program
    try:
        return _Converter(program).converted()
    except _CannotLie:
        return program


class _Converter:
    """Builds the new graph node by node."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self.at: fx.Node

    def converted(self) -> Program:
        """The program in its new form."""
        for node in self.program.graph.nodes:
            self.at = node
            if node.op in ("placeholder", "get_attr"):
                self.new[node] = self.graph.node_copy(node)
            elif _convolves(node):
                self.new[node] = self._convolution(node)
            elif node.op == "output" or acts(node) or node.target is aten.as_strided.default:
                self.new[node] = self.graph.node_copy(node, self._as_it_was)
            else:
                self.new[node] = self._op(node)
        return self.program.with_graph(self.graph)

    def _convolution(self, node: fx.Node) -> fx.Node:
        images = [node.args[position] for position in CONVOLVED[node.target]]  # type: ignore[index]
        made = self.graph.node_copy(node, lambda item: self._last(item) if item in images else self.new[item])
        described = value(node)
        if isinstance(described, tuple):
            dx, dw, db = described
            set_value(made, (_described_last(dx), _described_last(dw), db))
        else:
            set_value(made, _described_last(described))
        return made

    def _op(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, self.new.__getitem__)
        if all(_alike(self.new[item], item) for item in node.all_input_nodes):
            return made
        described = _described_last(value(node)) if _keeps_last(made, node) else computed(made)
        if described is None:  # a view that takes no images in this layout
            self.graph.erase_node(made)
            made = self.graph.node_copy(node, lambda item: self._in(self.new[item], _CONTIGUOUS))
            described = computed(made)
        if node.target is operator.getitem:
            described = value(self.new[node.args[0]])[node.args[1]]  # type: ignore[index]
        if described is None and value(node) is not None:
            raise _CannotLie
        set_value(made, described)
        if _is_gradient_of_weight(node) and not _alike(made, node):
            made = self._in(made, _CONTIGUOUS)
        return made

    def _last(self, item: fx.Node) -> fx.Node:
        new = self.new[item]
        return new if _alike_last(form(new)) else self._in(new, _LAST)

    def _as_it_was(self, item: fx.Node) -> fx.Node:
        new = self.new[item]
        if _alike(new, item):
            return new
        copy = self._in(new, _CONTIGUOUS)
        if not _alike(copy, item):
            raise _CannotLie
        return copy

    def _in(self, new: fx.Node, layout: torch.memory_format) -> fx.Node:
        described = form(new)
        if described is None:
            return new
        if (new, layout) not in self.copies:
            copy = self.graph.call_function(aten.clone.default, (new,), {"memory_format": layout})
            make = Layout.channels_last if layout is _LAST else Layout.contiguous
            set_value(copy, replace(described, stride=make(*described.shape).stride))
            set_origin(copy, origin(new if self.at.op == "output" else self.at))
            self.copies[new, layout] = copy
        return self.copies[new, layout]


def _convolves(node: fx.Node) -> bool:
    """True for convolutions of images on a CPU, and their backward."""
    if node.target not in CONVOLVED or node.op != "call_function":
        return False
    described = [form(item) for item in node.all_input_nodes]
    return all(item is not None and item.device.type == "cpu" for item in described) and all(
        len(item.shape) == 4 for item in described[:2] if item is not None
    )


def _is_gradient_of_weight(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and _convolves(source) and bool(node.args[1] == 1)


def _keeps_last(made: fx.Node, node: fx.Node) -> bool:
    """True for ops on each number of channels-last images, all of one size: known without asking torch."""
    described = form(node)
    if (
        described is None
        or len(described.shape) != 4
        or torch.Tag.pointwise not in getattr(node.target, "tags", ())
    ):
        return False
    inputs = [item for item in map(form, made.all_input_nodes) if item is not None]
    images = [item for item in inputs if item.shape == described.shape]
    return (
        bool(images) and all(map(_alike_last, images)) and all(len(item.shape) in (0, 4) for item in inputs)
    )


def _alike(new: fx.Node, old: fx.Node) -> bool:
    """True for values in the same layout."""
    one, other = value(new), value(old)
    if isinstance(one, TensorMeta) and isinstance(other, TensorMeta):
        return one.layout.is_like(other.layout)
    return bool(one == other)


def _alike_last(described: TensorMeta | None) -> bool:
    return described is not None and Layout.channels_last(*described.shape).is_like(described.layout)


def _described_last(described: Any) -> Any:
    if not isinstance(described, TensorMeta):
        return described
    return replace(described, stride=Layout.channels_last(*described.shape).stride)
