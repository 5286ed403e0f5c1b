"""Chains: ops of forward and backward that work element by element and hang together, each to be one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_arguments
from monograph.elementwise.formulas import ALL_FORMULAS
from monograph.elementwise.parts import fits, is_number
from monograph.ir.meta import ScalarMeta, TensorMeta, form, grad_mode, value
from monograph.ir.program import Program
from monograph.layout import Layout, fills_a_block

_FLOATS = (torch.float32, torch.float64)
# An argument that is repeated has rows of so many elements, or a loop of a few elements would begin for each of them.
_LEAST_WIDTH = 16
# What calls take by themselves, in microseconds, and from how many elements on memory counts for more: see decision 0065.
_CALL, _RESULT, _OP, _NUMBER = (
    1.2,
    0.9,
    1.2,
    1.7,
)  # a chain, and for each result; an op, and a number in place of a tensor
_LARGE = 8192
_MOST_OPS, _MOST_TENSORS = 64, 40  # of a chain: what a compiler takes in no time, and a call


@dataclass(frozen=True)
class Place:
    """How an argument is spread over the elements of the results, in the order of their memory.

    `whole` is one element for each, `row` a row that is repeated, `column` a number for each row, `single` a number for all.
    """

    kind: str
    width: int = 0  # of a row


@dataclass(frozen=True)
class Chain:
    """Ops in the order of the program. They may run where the last of them is: nobody else reads a result before."""

    nodes: tuple[fx.Node, ...]
    layout: Layout  # of all results
    dtype: torch.dtype  # of its floats; the others are bool
    width: int  # of rows, if an argument is repeated, or 0

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What comes from outside, tensors and numbers, in the order of its first use."""
        inside = set(self.nodes)
        used = (given for node in self.nodes for given in node.all_input_nodes)
        return tuple(dict.fromkeys(node for node in used if node not in inside))

    @cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """What others read."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))

    @cached_property
    def tensors(self) -> tuple[fx.Node, ...]:
        """The inputs that are tensors."""
        return tuple(node for node in self.inputs if form(node) is not None)

    @cached_property
    def numbers(self) -> tuple[fx.Node, ...]:
        """The inputs that are numbers."""
        return tuple(node for node in self.inputs if form(node) is None)

    def place(self, node: fx.Node) -> Place:
        """How an input is spread."""
        made = form(node)
        found = None if made is None else place_of(made.layout, self.layout)
        assert found is not None
        return found

    @property
    def size(self) -> int:
        """How many elements a result has."""
        return math.prod(self.layout.shape)


def chains_of(program: Program, holds: Callable[[fx.Node], bool]) -> list[Chain]:
    """The chains of a program that are worth a loop, of ops whose formulas hold."""
    open_at, groups = dict[fx.Node, _Group](), list[_Group]()
    for node in program.graph.nodes:
        group = _group_at(node)
        if group is not None and not holds(node):
            group = None
        for other in dict.fromkeys(open_at[item] for item in node.all_input_nodes if item in open_at):
            joined = None if group is None else group.with_other(other)
            if joined is None:
                for item in other.nodes:  # it is read: nothing can be added any more
                    open_at.pop(item)
            else:
                groups.remove(other)
                group = joined
        if group is not None:
            groups.append(group)
            open_at.update(dict.fromkeys(group.nodes, group))
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    found = (_chain(group, order.__getitem__) for group in groups if group.dtype is not None)
    return [chain for chain in found if is_worth_it(chain)]


def is_worth_it(chain: Chain) -> bool:
    """True if one loop is faster than the ops."""
    if len(chain.nodes) < 2:
        return False
    with_numbers = [
        node for node in chain.nodes if any(map(is_number, node.args[1:2])) and len(node.args) == 2
    ]
    ops = _OP * len(chain.nodes) + _NUMBER * len(with_numbers)
    return ops > _CALL + _RESULT * len(chain.results) or chain.size >= _LARGE


@dataclass(frozen=True, eq=False)
class _Group:
    """Ops that may become a chain, as long as nobody has read a result."""

    nodes: tuple[fx.Node, ...]
    layout: Layout
    dtype: torch.dtype | None
    width: int

    def with_other(self, other: _Group) -> _Group | None:
        """Both as one, if they have one form."""
        nodes = (*other.nodes, *self.nodes)
        read = {item for node in nodes for item in node.all_input_nodes} - set(nodes)
        if (
            self.layout != other.layout
            or not _agree(self.dtype, other.dtype)
            or not _agree(self.width, other.width)
            or len(nodes) > _MOST_OPS
            or len(nodes) + len(read) > _MOST_TENSORS + _MOST_OPS
        ):
            return None
        return _Group(nodes, self.layout, self.dtype or other.dtype, self.width or other.width)


def _agree(one: object, other: object) -> bool:
    return not one or not other or one == other


def _chain(group: _Group, place: Callable[[fx.Node], int]) -> Chain:
    assert group.dtype is not None
    return Chain(tuple(sorted(group.nodes, key=place)), group.layout, group.dtype, group.width)


def _group_at(node: fx.Node) -> _Group | None:
    """An op alone, if a formula says what it computes for each element."""
    made = form(node)
    formula = ALL_FORMULAS.get(node.target)
    if (
        formula is None
        or made is None
        or not node.users
        or grad_mode(node) is not None
        or not _is_taken(made)
        or not fills_a_block(made.shape, made.stride)
    ):
        return None
    given = named_arguments(node.target, node.args, node.kwargs)
    tensors = [found for item in node.all_input_nodes if (found := form(item)) is not None]
    places = [place_of(item.layout, made.layout) for item in tensors]
    dtypes = {item.dtype for item in (made, *tensors)} - {torch.bool}
    widths = {place.width for place in places if place is not None and place.width}
    if (
        not all(map(_is_taken, tensors))
        or None in places
        or len(dtypes) > 1
        or len(widths) > 1
        or any(width < _LEAST_WIDTH for width in widths)
        or any(given.get(name) not in values for name, values in formula.only.items())
        or formula.is_test != (made.dtype is torch.bool)
        or not _is_clear(made, tensors, given)
        or not fits(node, _is_tensor)
        or not all(_is_float(item) for item in node.all_input_nodes)
    ):
        return None
    return _Group((node,), made.layout, next(iter(dtypes), None), next(iter(widths), 0))


def _is_clear(made: TensorMeta, tensors: Sequence[TensorMeta], given: Mapping[str, Any]) -> bool:
    """False where masks alone are given, and so do not say in which type eager's kernel computes."""
    has_number = any(map(is_number, given.values()))
    return any(item.dtype in _FLOATS for item in tensors) or has_number != (made.dtype is torch.bool)


def _is_taken(made: TensorMeta) -> bool:
    is_element = made.dtype in _FLOATS or made.dtype is torch.bool
    return made.device.type == "cpu" and is_element and not made.varies


def _is_tensor(item: object) -> bool:
    return isinstance(item, fx.Node) and form(item) is not None


def _is_float(node: fx.Node) -> bool:
    """False for a number that has no place among doubles."""
    described = value(node)
    return not isinstance(described, ScalarMeta) or (is_number(node) and described.kind == "float")


def place_of(given: Layout, whole: Layout) -> Place | None:
    """How an argument is spread over a block of results; None if in no way that loops know."""
    missing = len(whole.shape) - len(given.shape)
    if missing < 0:
        return None
    steps = [(step, 0 if size == 1 else own) for size, step, own in _dimensions(given, whole, missing)]
    steps.sort(reverse=True)
    large, own = [step for step, _ in steps], [step for _, step in steps]
    if own == large:
        return Place("whole")
    if not any(own):
        return Place("single")
    for split in range(1, len(steps)):
        width = large[split - 1]  # the elements of all dimensions from there on
        if own[split:] == large[split:] and not any(own[:split]):
            return Place("row", width)
        if not any(own[split:]) and own[:split] == [step // width for step in large[:split]]:
            return Place("column", width)
    return None


def _dimensions(given: Layout, whole: Layout, missing: int) -> Iterator[tuple[int, int, int]]:
    """For each dimension of more than one element the size and step of an argument, and the step of the results."""
    shape: Sequence[int] = (*[1] * missing, *given.shape)
    stride: Sequence[int] = (*[0] * missing, *given.stride)
    for size, step, length, large in zip(shape, stride, whole.shape, whole.stride, strict=True):
        if length > 1:
            yield size, large, step
