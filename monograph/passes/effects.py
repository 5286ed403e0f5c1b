"""Which ops do more than compute their results, and which values share memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.ops import HigherOrderOperator, OpOverload, has_effect, is_custom, is_random
from monograph.ir.memory import Groups, shown_values, shows_nothing
from monograph.ir.meta import form, output_nodes

aten = torch.ops.aten

# Ops that give each element the same bits wherever the tensor begins. Matrix products and vector functions of the
# math library may look at the alignment, which a copy has and a view has not.
_ELEMENTWISE = frozenset(
    (
        aten.add.Tensor,
        aten.addcdiv.default,
        aten.addcmul.default,
        aten.clone.default,
        aten.div.Tensor,
        aten.lerp.Scalar,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.sub.Tensor,
        aten.slice_scatter.default,
        aten.where.self,
        aten._to_copy.default,
    )
)


def acts(node: fx.Node) -> bool:
    """True for ops that must run even if nothing reads their results: they draw, check values, or talk to other processes."""
    if isinstance(node.target, HigherOrderOperator):
        return any(map(acts, _branch_nodes(node)))
    return _acts(node.target)


def is_pure(node: fx.Node) -> bool:
    """True for ops that give the same for the same arguments, and do nothing else, as far as torch knows."""
    return node.op == "call_function" and _is_pure(node.target)


def is_elementwise(target: Any) -> bool:
    """True for ops that give each element the same bits wherever a tensor begins, in memory of their own."""
    return target in _ELEMENTWISE


@cache
def _acts(target: Any) -> bool:
    return is_random(target) or has_effect(target) or communicates(target)


@cache
def _is_pure(target: Any) -> bool:
    # one that comes from outside may count or draw
    return not (isinstance(target, HigherOrderOperator) or is_custom(target) or _acts(target))


def size_depends_on_data(node: fx.Node) -> bool:
    """True for results whose size is known only once they are there; the program holds what it should be."""
    source = node.args[0] if node.target is getitem else node
    target = source.target if isinstance(source, fx.Node) else None
    return isinstance(target, OpOverload) and torch.Tag.dynamic_output_shape in target.tags


def _branch_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the functions that an op such as `torch.cond` is given."""
    module = node.graph.owning_module
    for item in node.all_input_nodes:
        branch = getattr(module, str(item.target), None) if item.op == "get_attr" else None
        if isinstance(branch, fx.GraphModule):
            yield from branch.graph.nodes


def _may_show(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the results of a node may show; of one of several results, what they are together."""
    if node.op in ("placeholder", "output", "get_attr"):
        return []
    shown = shown_values(node)
    return node.all_input_nodes if shown is None else list(chain.from_iterable(shown))


def _shows(node: fx.Node) -> list[fx.Node]:
    """The same, but of one of several results what that shows itself."""
    return _may_show(node) if (own := _shown_by_item(node)) is None else own


def _shown_by_item(node: fx.Node) -> list[fx.Node] | None:
    """What a single tensor of several results shows; None for anything else, and where that is not known."""
    if node.target is not getitem or form(node) is None:
        return None
    source, index = node.args
    assert isinstance(source, fx.Node)
    shown = shown_values(source)
    if shown is None or not isinstance(index, int):
        return None
    if len(shown) == 1:  # a list: what its op does not mark as views are tensors of their own
        return None if shown[0] else []
    return shown[index]


class Memory:
    """Which values of a graph may share memory, and which share it with something that leaves the program.

    Several results of one op count as one value, since they are made or left out together; only `leaves` tells them apart.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._groups, self._single = Groups(), Groups()
        for node in graph.nodes:
            if shows_nothing(node.target):
                continue
            sources = _may_show(node)
            for source in sources:
                self._groups.join(node, source)
            for source in _shows(node) if node.target is getitem else sources:
                self._single.join(node, source)
        self._returned = {item for item in output_nodes(graph) if isinstance(item, fx.Node)}
        self._visible = set(map(self.owner, self._returned))
        self._leaving = set(map(self._single.owner, self._returned))

    def owner(self, node: fx.Node) -> fx.Node:
        """One value that stands for all that share memory with `node`."""
        return self._groups.owner(node)

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """From now on the two share memory."""
        self._groups.join(node, other)
        self._single.join(node, other)

    def leaves(self, node: fx.Node) -> bool:
        """True for a value whose own memory leaves the program."""
        return self._single.owner(node) in self._leaving

    def is_returned(self, node: fx.Node) -> bool:
        """True for values that the program returns themselves."""
        return node in self._returned

    def is_fresh(self, node: fx.Node) -> bool:
        """True for a result of an op of torch that makes memory for it: no view, and no input."""
        made = node.op == "call_function" and (isinstance(node.target, OpOverload) or node.target is getitem)
        return made and form(node) is not None and not _shows(node)

    def is_visible(self, node: fx.Node) -> bool:
        """True for values on memory that leaves the program."""
        return self.owner(node) in self._visible

    def can_merge(self, node: fx.Node, other: fx.Node) -> bool:
        """True if nobody outside can tell whether two equal values are one.

        For a pass that lets the readers of `node` read `other`, the result of another op that computes the same. Two values
        that the program returns stay two tensors, and two that leave it on memory of their own keep that. Is `node` a copy
        of `other`, so that `other` may be an input or a view, ask `copies_in_vain`. Afterwards `merge` notes what was done.
        """
        if self.is_returned(node) and self.is_returned(other):
            return False
        return self.owner(node) is self.owner(other) or not (self.is_visible(node) and self.is_visible(other))

    def merge(self, node: fx.Node, other: fx.Node) -> None:
        """Note that two values became one."""
        visible, leaves = (
            self.is_visible(node) or self.is_visible(other),
            self.leaves(node) or self.leaves(other),
        )
        if self.is_returned(node):
            self._returned.add(other)
        self.join(node, other)
        if visible:
            self._visible.add(self.owner(other))
        if leaves:
            self._leaving.add(self._single.owner(other))


def copies_in_vain(node: fx.Node, source: fx.Node, memory: Memory) -> bool:
    """True for a copy, in the form of what it copies, that nobody can tell from it: its readers may read the source.

    For a pass that drops an op which gives again what is there: a copy, or what amounts to one. A source that an op has
    made is as good as the copy, unless it leaves the program. An input or a view may be changed by others once the step
    has run, and begins anywhere in memory: the copy must stay inside, with readers whose bits do not depend on that.
    Afterwards `memory.merge` notes what was done.
    """
    described = form(node)
    if described is None or described.dtype.is_complex:  # a copy resolves a conjugation that waits
        return False
    if memory.is_fresh(source):
        return not memory.leaves(source)
    return all(reader.target in _ELEMENTWISE for reader in node.users)  # which give memory of their own
