"""The whole numbers of a program that are computed from sizes of tensors, and nothing else."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import ScalarMeta, TensorMeta, metas, set_value, value, write_op
from monograph.ir.program import Program
from monograph.sizes.expression import Expression, Quotient
from monograph.sizes.place import places_in, size_places
from monograph.sizes.size import Size, size_of
from monograph.user_code.lines import Origin

aten = torch.ops.aten
_READ = (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)
_COMPUTED = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    torch.sym_max,
    torch.sym_min,
)


def reads_sizes(graph: fx.Graph) -> bool:
    """True if an op of it reads a size of a tensor."""
    return any(node.target in _READ for node in graph.nodes)


def numbers_of_sizes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Those that compilers keep as numbers: the shapes of what they compute are made of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        described = value(node) if node.op == "call_function" else None
        if not isinstance(described, ScalarMeta) or described.kind != "int":
            continue
        is_computed = node.target in _COMPUTED and all(
            item in found if isinstance(item, fx.Node) else type(item) is int for item in node.args
        )
        if node.target in _READ or is_computed:
            found.add(node)
    return frozenset(found)


def sizes_written(program: Program) -> Program:
    """The program with the sizes that vary in place of the ops that compute them: for those who know the sizes first."""
    parts = tuple(map(sizes_written, program.parts))
    if any(new is not old for new, old in zip(parts, program.parts, strict=True)):
        program = program.with_parts(parts)
    numbers = numbers_of_sizes(program.graph)
    if not numbers:
        return program
    found = sizes_of(numbers)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node not in numbers:
            new[node] = graph.node_copy(node, lambda item: found.get(item, new.get(item)))
    return program.with_graph(graph)


def at_present_sizes(program: Program) -> Program:
    """The program for the sizes of its capture alone."""
    return _in_numbers(sizes_written(program), int)


def with_sizes_given(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program for these sizes alone, by the names of all that vary."""
    return _in_numbers(
        sizes_written(program), lambda size: int(size_of(int(size), size.expression.given(sizes)))
    )


def _in_numbers(program: Program, number_of: Callable[[Size], int]) -> Program:
    parts = tuple([_in_numbers(part, number_of) for part in program.parts])
    copied = program.with_parts(parts).rebuilt()
    for node in copied.graph.nodes:
        node.args, node.kwargs = _replaced((node.args, dict(node.kwargs)), number_of)
        set_value(node, _replaced(value(node), number_of))
    return copied


def _replaced(item: Any, instead_of: Callable[[Size], Any]) -> Any:
    match item:
        case Size():
            return instead_of(item)
        case tuple() | list():
            return type(item)([_replaced(part, instead_of) for part in item])
        case dict():
            return {key: _replaced(part, instead_of) for key, part in item.items()}
        case TensorMeta():
            shape, stride = (_replaced(part, instead_of) for part in (item.shape, item.stride))
            return replace(item, shape=shape, stride=stride)
    return item


def sizes_of(numbers: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The sizes that such nodes compute, of one graph, and those that they are computed from."""
    found: dict[fx.Node, int] = {}
    for number in numbers:
        _size(number, found)
    return found


def _size(node: fx.Node, found: dict[fx.Node, int]) -> int:
    if node not in found:
        if node.target in _READ:
            found[node] = _size_read(node)
        else:
            given = [_size(item, found) if isinstance(item, fx.Node) else item for item in node.args]
            found[node] = node.target(*given)  # type: ignore[operator]
    return found[node]


def _size_read(node: fx.Node) -> int:
    described = value(node.args[0])  # type: ignore[arg-type]
    assert isinstance(described, TensorMeta)
    if node.target is aten.sym_numel.default:
        return math.prod(described.shape)
    return (described.shape if node.target is aten.sym_size.int else described.stride)[node.args[1]]  # type: ignore[index]


def is_same_at(program: Program, other: Program, sizes: Mapping[str, int]) -> bool:
    """True if a program with sizes that vary makes at these sizes what another one makes, op by op.

    In the other one these are numbers. Sizes that vary in both may be any.
    """
    others = sizes_written(other)
    known = {**_fixed(program, other), **sizes}

    def instead_of(size: Size) -> int:
        return size_of(int(size), size.expression.given(known))

    numbered = _in_numbers(sizes_written(program), instead_of)
    pairs = zip(numbered.programs, others.programs, strict=False)
    return len(numbered.parts) == len(others.parts) and all(_is_same(*pair) for pair in pairs)


def _fixed(program: Program, other: Program) -> dict[str, int]:
    """The sizes that have names in a program, but are numbers in another one: as the capture has found them."""
    named, vary = (
        {name: item[place.position][place.dim] // place.parts for name, place in places_in(item)}
        for item in map(_shapes, (program, other))
    )
    return {name: int(size) for name, size in named.items() if name not in vary}


def _shapes(program: Program) -> list[tuple[int, ...]]:
    inputs = program.graph.find_nodes(op="placeholder")
    return [meta.shape for node in inputs for meta in metas(value(node)) if isinstance(meta, TensorMeta)]


def _is_same(one: Program, other: Program) -> bool:
    ports = [[(port.role, port.path) for port in (*item.inputs, *item.outputs)] for item in (one, other)]
    if ports[0] != ports[1] or len(one.graph.nodes) != len(other.graph.nodes):
        return False
    names: dict[fx.Node, fx.Node] = {}
    for ours, theirs in zip(one.graph.nodes, other.graph.nodes, strict=True):
        names[theirs] = ours
        if ours.op != theirs.op or (ours.op != "placeholder" and ours.target != theirs.target):
            return False
        given = fx.map_arg((theirs.args, dict(theirs.kwargs)), names.__getitem__)
        if repr((ours.args, dict(ours.kwargs))) != repr(given):
            return False
        if [*map(_form, metas(value(ours)))] != [*map(_form, metas(value(theirs)))]:
            return False
    return True


def _form(meta: TensorMeta | ScalarMeta) -> object:
    """What a tensor is, but for the strides of sizes of one."""
    if not isinstance(meta, TensorMeta):
        return meta
    stride = [step for step, size in zip(meta.stride, meta.shape, strict=True) if size != 1]
    return replace(meta, stride=()), stride


def compute_sizes(graph: fx.Graph) -> None:
    """Let the graph compute the sizes that vary which a pass has written into it from a description."""
    if not any(meta.varies for node in graph.find_nodes(op="placeholder") for meta in metas(value(node))):
        return
    written = [
        node
        for node in graph.nodes
        if any(isinstance(item, Size) for item in leaves_in([node.args, list(node.kwargs.values())]))
    ]
    if not written:
        return
    made = _Numbers(graph)
    for node in written:
        with graph.inserting_before(node):
            node.args, node.kwargs = _replaced(
                (node.args, dict(node.kwargs)), lambda size: made.of(size.expression)
            )


class _Numbers:
    """Nodes that compute sizes where the graph is being written."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._inputs = graph.find_nodes(op="placeholder")
        described = map(value, self._inputs)
        self._places = size_places(item.shape if isinstance(item, TensorMeta) else () for item in described)

    def of(self, expression: Expression) -> fx.Node | int:
        """A node of this value; a number if it is one."""
        terms = [self._product(product, factor) for product, factor in expression.terms.items()]
        return reduce(lambda one, other: self._call(operator.add, one, other), terms) if terms else 0

    def _product(self, product: tuple[str | Quotient, ...], factor: int) -> fx.Node | int:
        if not product:
            return factor
        node = reduce(
            lambda one, other: self._call(operator.mul, one, other), [self._atom(atom) for atom in product]
        )
        return node if factor == 1 else self._call(operator.mul, node, factor)

    def _atom(self, atom: str | Quotient) -> fx.Node:
        if isinstance(atom, Quotient):
            return self._call(operator.floordiv, self.of(atom.dividend), self.of(atom.divisor))
        position, dim, parts = self._places[atom]
        whole = self._call(aten.sym_size.int, self._inputs[position], dim)
        return whole if parts == 1 else self._call(operator.floordiv, whole, parts)

    def _call(self, target: Any, *args: fx.Node | int) -> fx.Node:
        return write_op(self._graph, target, args, ScalarMeta("int"), Origin(phase="forward"))
