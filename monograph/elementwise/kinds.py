"""The C code of an update. Parts that compute alike are of one kind, and share it; sizes and numbers are its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from monograph.compat.inductor.codegen import SAME_POINTERS
from monograph.compat.ops import named_arguments, schema_arguments
from monograph.elementwise.formulas import CALLED, FORMULAS, NUMBERS, constant
from monograph.elementwise.parts import READ, Part
from monograph.ir.meta import TensorMeta, form, frozen

C_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float", torch.float64: "double"}
HEAD = """\
#include <math.h>
#include <float.h>
#include <stdbool.h>
#define merged(a, b, c) _Generic((c), float: __builtin_fmaf, default: __builtin_fma)(a, b, c)
#define absolute(a) _Generic((a), float: __builtin_fabsf, default: __builtin_fabs)(a)
#define squareroot(a) _Generic((a), float: __builtin_sqrtf, default: __builtin_sqrt)(a)
static double power(double a, double b) { return a > 0 ? pow(a, b) : a == 0 && b > 0 ? 0 : NAN; }
"""
_OWN = """\
typedef {T} T;
#define AT(slot, type) ((type*)pointers[item * {slots} + slot])
"""
_ARGUMENTS = "void** pointers, const double* given, const long* which, double* made"
AWriter = TypeVar("AWriter", bound="Writer")
Code = TypeVar("Code")
Choose = Callable[[fx.Node], int]  # which text of a formula holds for the op at a node


@dataclass(frozen=True)
class Kind:
    """The code of parts that compute alike, and the ops that it leaves to eager's kernels, by stage."""

    text: str
    dtype: torch.dtype
    calls: tuple[tuple[Any, ...], ...]  # for each stage but the last: the ops, each with a buffer of its own
    num_made: int


@dataclass(frozen=True)
class Item:
    """A part as an argument of the code of its kind."""

    part: Part
    kind: Kind
    slots: tuple[fx.Node, ...]  # the tensors that it reads, and the state that it writes
    given: tuple[fx.Node, ...]  # the numbers that it is given

    @property
    def size(self) -> int:
        """How many elements each of its tensors has, but for single ones."""
        assert self.part.whole is not None
        return torch.Size(self.part.whole.shape).numel()


def items_of(parts: Iterable[Part], choose: Choose) -> list[Item]:
    """Parts with their code, which is written once for those that are alike; without those whose formulas do not hold here."""
    written = written_once(parts, lambda part: Writer(part, choose), lambda writer: writer.kind)
    return [Item(writer.part, kind, tuple(writer.slots), tuple(writer.given)) for writer, kind in written]


def written_once(
    parts: Iterable[Part], writer_of: Callable[[Part], AWriter], code_of: Callable[[AWriter], Code]
) -> Iterator[tuple[AWriter, Code]]:
    """A writer for each part, and its code, which is written once for those that are alike; without those that have none."""
    known: dict[tuple[Any, ...], Code | None] = {}
    for part in parts:
        writer, alike = writer_of(part), _likeness(part)
        if alike not in known:
            try:
                known[alike] = code_of(writer)
            except LookupError:
                known[alike] = None
        if (code := known[alike]) is not None:
            yield writer, code


def _likeness(part: Part) -> tuple[Any, ...]:
    """What the code of a part depends on: its ops and what each is given, but for sizes and names."""
    places = {node: index for index, node in enumerate((*part.inputs, *part.nodes))}
    outer = [_kind_of(node, part) for node in part.inputs]
    ops = [
        (
            node.target,
            _kind_of(node, part),
            frozen((node.args, dict(node.kwargs)), lambda item: ("node", places[item])),
        )
        for node in part.nodes
    ]
    writes = [(places[node], places.get(state, -1)) for node, state in part.writes.items()]
    return (tuple(outer), tuple(ops), tuple(writes))


def _kind_of(node: fx.Node, part: Part) -> tuple[Any, ...]:
    made = form(node)
    return (None,) if made is None else (made.dtype, bool(made.shape) and made == part.whole)


class Writer:
    """Writes the code of a part, with names for all that it computes that other parts of its kind would have, too."""

    def __init__(self, part: Part, choose: Choose) -> None:
        assert part.whole is not None
        self.part, self._choose, self._whole = part, choose, part.whole
        self.slots = list(dict.fromkeys((*filter(form, part.inputs), *part.writes.values())))
        self.given = [node for node in part.inputs if form(node) is None]
        self._names = {node: f"x{index}" for index, node in enumerate(self.slots)}
        self._names |= {node: f"g{index}" for index, node in enumerate(self.given)}
        self._names |= {node: f"v{index}" for index, node in enumerate(part.nodes)}
        self._dtypes = {made.dtype for node in part.nodes if (made := form(node)) is not None}
        self._loops = [node for node in part.nodes if self._is_whole(node)]
        self._called = [node for node in self._loops if node.target in CALLED]
        self._level: dict[fx.Node, int] = {}
        for node in self._loops:
            below = [
                self._level[item] + (item in self._called)
                for item in node.all_input_nodes
                if item in self._level
            ]
            self._level[node] = max(below, default=0)
        self._made = [
            node
            for node in part.nodes
            if form(node) is None and any(self._is_whole(user) for user in node.users)
        ]

    def _is_whole(self, node: fx.Node) -> bool:
        """True for what loops compute: tensors of no dimension are computed beside them."""
        return bool(self._whole.shape) and form(node) == self._whole

    @cached_property
    def kind(self) -> Kind:
        """The code of all parts that are like this one."""
        last = max((self._level[node] + (node in self._called) for node in self._loops), default=0)
        head = HEAD + SAME_POINTERS + _OWN.format(T=C_TYPES[self._whole.dtype], slots=len(self.slots))
        functions = [
            self._numbers(),
            *(self._stage(level, last) for level in range(last + 1)),
            self._singles(),
        ]
        calls = tuple(
            tuple(CALLED[node.target].op for node in self._called if self._level[node] == level)
            for level in range(last)
        )
        return Kind(
            "\n".join([head, *functions]),
            self._whole.dtype,
            calls,
            len(self._made),
        )

    # --- functions ---------------------------------------------------------------------------------------------------

    def _numbers(self) -> str:
        """Computes the numbers of all items; gives 1, before anything is written, if Python has to."""
        lines = [*self._single_values(), *self._refusals()]
        lines += [
            f"made[item * {len(self._made)} + {i}] = {self._names[n]};" for i, n in enumerate(self._made)
        ]
        return (
            f"int numbers(long items, {_ARGUMENTS}) {{\n  for (long item = 0; item < items; item++) {{\n"
            + "".join(f"    {line}\n" for line in lines)
            + "  }\n  return 0;\n}"
        )

    def _stage(self, level: int, last: int) -> str:
        """The loops up to the ops that are called at a level; the last ones write the new state."""
        known = {node for node in self._called if self._level[node] < level}
        called = [node for node in self._called if self._level[node] == level]
        writes = {node: state for node, state in self.part.writes.items() if self._is_whole(node)}
        ends = list(writes) if level == last else [node.all_input_nodes[0] for node in called]
        needed = self._needed(ends, known)
        inside = self._loads([*needed, *ends], known)
        inside += [f"const T {self._names[node]} = {self._element(node, known)};" for node in needed]
        if level == last:
            inside += [f"{self._at(state)} = {self._names[node]};" for node, state in writes.items()]
        else:
            inside += [f"{self._at(node)} = {self._shown_to(node)};" for node in called]
        outside = self._outside(inside)
        return (
            f"void stage{level}(long first, long last, const long* pieces, {_ARGUMENTS}, T** buffers) {{\n"
            "  #pragma omp parallel for if (last - first > 1)\n"
            "  for (long piece = first; piece < last; piece++) {\n"
            "    const long item = pieces[4 * piece], start = pieces[4 * piece + 1], count = pieces[4 * piece + 2];\n"
            "    const long place = pieces[4 * piece + 3]; (void)place; (void)start;\n"
            + "".join(f"    {line}\n" for line in outside)
            + "    #pragma GCC ivdep\n    for (long i = 0; i < count; i++) {\n"
            + "".join(f"      {line}\n" for line in inside)
            + "    }\n  }\n}"
        )

    def _loads(self, nodes: Sequence[fx.Node], known: set[fx.Node]) -> list[str]:
        """The elements of the tensors that nodes read."""
        read = (
            item for node in nodes for item in ([node] if node in self.slots else self._read_by(node, known))
        )
        return [
            f"const T {self._names[item]} = {self._at(item)};"
            for item in dict.fromkeys(read)
            if item in self.slots
        ]

    def _read_by(self, node: fx.Node, known: set[fx.Node]) -> list[fx.Node]:
        """What an element is computed from: of one that is known already, nothing but whether that is zero."""
        return [] if node in known and not CALLED[node.target].keeps_zeros else node.all_input_nodes

    def _element(self, node: fx.Node, known: set[fx.Node]) -> str:
        if node not in known:
            return self._value(node, "T")
        before = self._names[node.all_input_nodes[0]]
        return (
            f"{before} == 0 ? {before} : {self._at(node)}"
            if CALLED[node.target].keeps_zeros
            else self._at(node)
        )

    def _shown_to(self, node: fx.Node) -> str:
        before = self._names[node.all_input_nodes[0]]
        return f"{before} == 0 ? 1 : {before}" if CALLED[node.target].keeps_zeros else before

    def _at(self, node: fx.Node) -> str:
        """An element of a tensor of the part, or of the buffer of an op that is called."""
        return f"p{self.slots.index(node)}[i]" if node in self.slots else f"b{self._called.index(node)}[i]"

    def _outside(self, lines: Sequence[str]) -> list[str]:
        """What a loop needs that is the same for all elements."""
        words = set(re.findall(r"\w+", " ".join(lines)))
        found = [
            f"const T {name} = {self._number_in_loop(node)};"
            for node, name in self._names.items()
            if name in words and form(node) is None
        ]
        found += [
            f"T* p{index} = AT({index}, T) + start;"
            for index in range(len(self.slots))
            if f"p{index}" in words
        ]
        return found + [
            f"T* b{index} = buffers[{index}] + place;"
            for index in range(len(self._called))
            if f"b{index}" in words
        ]

    def _singles(self) -> str:
        """Writes new state of one element beside larger tensors."""
        writes = self._single_writes()
        lines = [*(self._single_values() if writes else []), *writes]
        return (
            f"void singles(long items, {_ARGUMENTS}) {{\n  for (long item = 0; item < items; item++) {{\n"
            + "".join(f"    {line}\n" for line in lines if "return 1" not in line)
            + "  }\n}"
        )

    def _single_writes(self) -> list[str]:
        return [
            f"*AT({self.slots.index(state)}, {self._type(node)}) = {self._names[node]};"
            for node, state in self.part.writes.items()
            if not self._is_whole(node)
        ]

    # --- values ------------------------------------------------------------------------------------------------------

    def _single_values(self) -> list[str]:
        """Numbers, and tensors of one element beside larger ones, in order."""
        lines = [
            f"const double {self._names[node]} = {self._given(node)}; (void){self._names[node]};"
            for node in self.given
        ]
        lines += [
            f"const {self._type(node)} {self._names[node]} = *AT({index}, {self._type(node)});"
            for index, node in enumerate(self.slots)
            if not self._is_whole(node) and node in self.part.inputs
        ]
        for node in self.part.nodes:
            if not self._is_whole(node):
                kind = self._type(node)
                lines.append(f"const {kind} {self._names[node]} = {self._value(node, kind)};")
                if form(node) is None and node.target is not READ:
                    lines.append(f"if (!isfinite({self._names[node]})) return 1;")
        return lines

    def _refusals(self) -> list[str]:
        """Numbers that eager's kernels do not take, or for which they compute the last elements otherwise."""
        read = dict.fromkeys(
            item for node in self.part.nodes if form(node) is not None for item in node.all_input_nodes
        )
        largest = "FLT_MAX" if torch.float32 in self._dtypes else "DBL_MAX"
        lines = [
            f"if (!(fabs({self._names[item]}) <= {largest})) return 1;" for item in read if form(item) is None
        ]
        for node in self.part.nodes:
            formula = FORMULAS.get(node.target)
            if formula is not None and formula.unless:
                condition = formula.refused(self._arguments(node, "T"))
                lines.append(f"if ({condition}) return 1;")
        return lines

    def _value(self, node: fx.Node, kind: str) -> str:
        if node.target is READ:
            return f"(double){self._names[node.all_input_nodes[0]]}"
        if node.target in NUMBERS and callable(node.target):
            return NUMBERS[node.target].format(*(self._spelled(item, "double") for item in node.args))
        formula = FORMULAS[node.target]
        return formula.written(self._choose(node), self._arguments(node, kind))

    def _arguments(self, node: fx.Node, kind: str) -> dict[str, str]:
        given = named_arguments(node.target, node.args, node.kwargs)
        return {
            item.name: self._spelled(given.get(item.name, item.default), kind)
            for item in schema_arguments(node.target)
        }

    def _spelled(self, item: Any, kind: str) -> str:
        if isinstance(item, fx.Node):
            name = self._names[item]
            return name if form(item) is not None or kind == "double" else f"(({kind}){name})"
        return constant(item, kind)

    def _given(self, node: fx.Node) -> str:
        return f"given[which[item * {len(self.given)} + {self.given.index(node)}]]"

    def _number_in_loop(self, node: fx.Node) -> str:
        if node in self.given:
            return f"(T){self._given(node)}"
        return f"(T)made[item * {len(self._made)} + {self._made.index(node)}]"

    def _type(self, node: fx.Node) -> str:
        described = form(node)
        return C_TYPES[described.dtype] if isinstance(described, TensorMeta) else "double"

    def _needed(self, ends: Sequence[fx.Node], known: set[fx.Node]) -> list[fx.Node]:
        """The loops' values that `ends` depend on, in order, none that is known already before."""
        needed: set[fx.Node] = set()
        pending = list(ends)
        while pending:
            node = pending.pop()
            if node in self._level and node not in needed:
                needed.add(node)
                pending += self._read_by(node, known)
        return [node for node in self._loops if node in needed]
