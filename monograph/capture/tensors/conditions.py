"""Branches that Python took on numbers that may move, turned into conditions checked before each step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.arithmetic import Condition, raises, same
from monograph.capture.numbers.random import nothing_drawn
from monograph.capture.tensors.readings import Readings
from monograph.compat.amp import without_autocast
from monograph.compat.ops import is_random, named_input
from monograph.compat.symbolic_numbers import is_symbolic, symbol_name
from monograph.errors import DataDependentError, first_line
from monograph.ir.call.differences import change_text
from monograph.ir.call.numbers import spell_number
from monograph.ir.call.reason import FIXED, OF_GROUP, Cause, Reason
from monograph.ir.graph_signature import Number, Source
from monograph.ir.meta import forget_torch_meta, needed_by, origin, output_nodes
from monograph.ir.port import Role
from monograph.sizes.place import SizePlace

Check = Callable[[Sequence[Any], Sequence[Any]], bool]
_SAME = re.compile(r'same\((.+), ([^,() ]+|float\("[^"]+"\))\)$')
INPUT = re.compile(r"\bi\[(\d+)\]")  # of `Conditions.texts`, as NUMBER
NUMBER = re.compile(r"\bn\[(\d+)\]")
_READABLE = (Role.OPTIM, Role.HYPER, Role.CAPTURED)  # foreach optimizers count with a tensor that holds 1.0


def read_outs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read a number out of a tensor, in order."""
    scalar = torch.ops.aten._local_scalar_dense.default
    return [node for node in graph.nodes if node.target is scalar]


def symbols_read_out(graph: fx.Graph) -> list[str]:
    """The symbols of those numbers."""
    values = [node.meta["val"] for node in read_outs(graph)]
    return [symbol_name(value) if is_symbolic(value) else "" for value in values]


@dataclass(frozen=True)
class ReadOut:
    """Numbers that are known before a step: computed from the inputs of the program at these positions."""

    positions: tuple[int, ...]
    module: fx.GraphModule

    def read(self) -> list[frozenset[int]]:
        """For each number the positions of the inputs that it is computed from."""
        places = dict(zip(self.module.graph.find_nodes(op="placeholder"), self.positions, strict=True))
        return [
            frozenset(places[node] for node in needed_by([item]) if node in places)
            for item in output_nodes(self.module.graph)
        ]

    def some(self, numbers: Sequence[int], moved: Mapping[int, int]) -> ReadOut:
        """Some of the numbers, of inputs that are at other positions."""
        items = [output_nodes(self.module.graph)[number] for number in numbers]
        needed, graph, copies = needed_by(items), fx.Graph(), dict[fx.Node, fx.Node]()
        positions = iter(self.positions)
        kept = []
        for node in self.module.graph.nodes:
            position = next(positions) if node.op == "placeholder" else None
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                kept += [] if position is None else [moved[position]]
        graph.output(tuple(copies[item] for item in items))
        return ReadOut(tuple(kept), fx.GraphModule(self.module, graph))

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad(), without_autocast(), nothing_drawn(self.module.graph.nodes):
            numbers: Sequence[Any] = self.module(*[inputs[position] for position in self.positions])
        return numbers


@dataclass(frozen=True)
class Conditions:
    """The branches of one build, as one check. `about` are their texts, with paths, for people."""

    about: tuple[str, ...]
    texts: tuple[str, ...]  # each as Python over `i`, the inputs, and `n`, the numbers that are read out
    read_out: ReadOut | None
    _checks: tuple[Check, ...]  # of each branch apart
    _check: Check  # of all
    sentences: frozenset[str] = frozenset()  # those of `about` that are sentences

    def are_about(self, sources: Sequence[Source], groups: Collection[int]) -> bool:
        """True if all they look at are numbers in param groups, by the ids of these; `sources` are the inputs."""
        positions = {int(found) for text in self.texts for found in INPUT.findall(text)}
        return self.read_out is None and all(
            type(source) is Number and id(source.container) in groups
            for source in map(sources.__getitem__, positions)
        )

    def and_also(
        self, texts: Iterable[str], places: Mapping[str, SizePlace], paths: Sequence[str]
    ) -> Conditions:
        """With conditions over names of sizes, each found in an input."""
        placed = {name: _size_at(place) for name, place in places.items()}
        known_as = {name: place.text(paths[place.position]) for name, place in places.items()}
        found = {_replaced(text, placed): _replaced(text, known_as) for text in texts}
        new = {text: about for text, about in found.items() if text not in self.texts}
        return replace(
            self,
            about=(*self.about, *new.values()),
            texts=(*self.texts, *new),
            _checks=(*self._checks, *map(_compiled, new)),
            _check=_together((*self.texts, *new)),
        )

    def over(self, positions: Sequence[int], state: Collection[int]) -> Conditions:
        """Those for a program that has only the inputs at these positions, in this order: others are about state it has not.

        `state` are the positions of all inputs that are state. Raises LookupError, with its text, for a condition about both.
        """
        moved = {position: index for index, position in enumerate(positions)}
        numbers = [] if self.read_out is None else self.read_out.read()
        kept, read = list[int](), set[int]()
        for index, text in enumerate(self.texts):
            known = {int(found) for found in INPUT.findall(text)}
            used = {int(found) for found in NUMBER.findall(text)}
            known |= {position for number in used for position in numbers[number]}
            if known.issubset(moved):
                kept.append(index)
                read |= used
            elif known & moved.keys() & set(state):
                raise LookupError(self.about[index])
        order = {number: place for place, number in enumerate(sorted(read))}
        texts = [
            NUMBER.sub(
                lambda found: f"n[{order[int(found[1])]}]",
                INPUT.sub(lambda found: f"i[{moved[int(found[1])]}]", self.texts[index]),
            )
            for index in kept
        ]
        return replace(
            self,
            about=tuple(self.about[index] for index in kept),
            texts=tuple(texts),
            read_out=self.read_out.some(list(order), moved) if self.read_out is not None and order else None,
            _checks=tuple(map(_compiled, texts)),
            _check=_together(texts),
        )

    def hold(self, inputs: Sequence[Any]) -> bool:
        """True if every branch would be taken as at capture with these inputs of the program."""
        try:
            numbers = self._numbers(inputs)
        except Exception:  # the ops refuse other values: so will the step, and names the user's line
            return False
        return _holds(self._check, inputs, numbers)

    def broken(self, inputs: Sequence[Any]) -> Iterator[Reason]:
        """The branches that would not be taken, as sentences."""
        try:
            numbers = self._numbers(inputs)
        except Exception as error:  # the ops refuse other values: so will the step
            yield Reason(f"what build() reads out of tensors cannot be computed: {error}", Cause.READ)
            return
        for index, check in enumerate(self._checks):
            if not _holds(check, inputs, numbers):
                yield self._reason(index, inputs, numbers)

    def _reason(self, index: int, inputs: Sequence[Any], numbers: Sequence[Any]) -> Reason:
        """What has become of a branch that is no longer taken."""
        about = self.about[index]
        if about in self.sentences:
            return Reason(f"no longer holds: {about}", Cause.READ, about)
        text, fixed = f"the branch `{about}` is no longer taken", FIXED.match(about)
        if fixed is not None:
            now = _present(self.texts[index], inputs, numbers)
            text = change_text(fixed[1], fixed[2], now) or text
        if " as updated)" in about:
            return Reason(text, Cause.COUNTED, about)
        if OF_GROUP.search(about):
            return Reason(text, Cause.HYPERPARAMETER, about, what="branch" if fixed is None else "fixed")
        return Reason(text, Cause.BRANCH, about) if fixed is None else Reason(text, Cause.FIXED, fixed[1])

    def _numbers(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return () if self.read_out is None else self.read_out(inputs)


def _present(text: str, inputs: Sequence[Any], numbers: Sequence[Any]) -> str:
    """The number of now in a condition that it stays what it is; what Python says where it cannot be computed."""
    found = _SAME.match(text)
    try:
        now: Any = None if found is None else _compiled(found[1])(inputs, numbers)
        return spell_number(now) if isinstance(now, (int, float)) else "something else"
    except (ArithmeticError, ValueError, TypeError) as error:
        return f"what cannot be computed ({first_line(error)})"


def _holds(check: Check, inputs: Sequence[Any], numbers: Sequence[Any]) -> bool:
    """True if a check holds; one that raises, also for what is no number, does not: capture meets the error at the user's line."""
    try:
        return check(inputs, numbers)
    except (ArithmeticError, ValueError, TypeError):
        return False


def scalar_conditions(
    branches: Iterable[Condition],
    backed: Mapping[str, int],
    unbacked: Mapping[str, fx.Node],
    readings: Readings,
    roles: Sequence[Role],
    paths: Sequence[str],
    sizes: Mapping[str, SizePlace] = MappingProxyType({}),
) -> Conditions:
    """One check over the program's inputs for every branch (text, symbols) that was recorded.

    `backed` maps a symbol to its input position, `unbacked` to the node of the program that reads it out, `sizes` to where
    it is found in an input, and `readings` know the numbers that Python has asked for; `roles` and `paths` are those of the inputs.
    """
    numbers: list[fx.Node | str] = []  # nodes of the program, and names of readings
    texts: dict[
        str, str
    ] = {}  # the check over `i`, the inputs, and `n`, the numbers read out → its text for people

    def place(name: str) -> str:
        if name in backed:
            return f"i[{backed[name]}]"
        if name in sizes:
            return _size_at(sizes[name])
        reading = readings.symbols.get(name, name)
        if reading not in readings.found and name not in unbacked:
            # no op reads it out: the place that a view has by the value of a tensor
            raise DataDependentError(
                "a size or a place in memory depends on the value of a tensor",
                hint="pass it as an integer, or pick elements with torch.index_select, which takes a tensor",
            )
        number = reading if reading in readings.found else unbacked[name]
        if number not in numbers:
            numbers.append(number)
        return f"n[{numbers.index(number)}]"

    for text, names in branches:
        places = {name: place(name) for name in names}
        placed = _replaced(text, places)
        if placed not in texts:
            known_as = {
                name: sizes[name].text(paths[sizes[name].position])
                if name in sizes
                else _known_as(name, backed, unbacked, readings, paths)
                for name in names
            }
            texts[placed] = readings.sentences.get(text) or _in_words(_with_names(text, known_as))
    read_out = _slice(numbers, readings, roles) if numbers else None
    checks = tuple(_compiled(text) for text in texts)
    sentences = frozenset(readings.sentences.values())
    return Conditions(tuple(texts.values()), tuple(texts), read_out, checks, _together(texts), sentences)


def _replaced(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda word: words.get(word[0], word[0]), text)


def _compiled(text: str) -> Check:
    known = (max, min, abs, round, int, float, same, raises, ZeroDivisionError, OverflowError, ValueError)
    scope = {"__builtins__": {}, "torch": torch, "math": math} | {item.__name__: item for item in known}
    check: Check = eval(f"lambda i, n: {text}", scope)  # our own trace's text
    return check


def _size_at(place: SizePlace) -> str:
    """A size as a check computes it from the inputs."""
    return place.text(f"i[{place.position}]")


def _together(texts: Iterable[str]) -> Check:
    return _compiled(" and ".join(f"({text})" for text in texts) or "True")


def _known_as(
    name: str,
    backed: Mapping[str, int],
    unbacked: Mapping[str, fx.Node],
    readings: Readings,
    paths: Sequence[str],
) -> str:
    if name in backed:
        return paths[backed[name]]
    reading = readings.symbols.get(name, name)
    return f"({readings.about(reading)})" if reading in readings.found else _sources(unbacked[name], paths)


def _with_names(text: str, known_as: Mapping[str, str]) -> str:
    """The text of a branch with paths in place of the symbols that torch made up."""
    named = _replaced(text, known_as)
    return re.sub(r"\.0{9,}\b", ".0", named)  # torch writes 2.0 with sixteen digits


def _in_words(text: str) -> str:
    """The text of a branch as people write it: `x = 2` for a number that has to stay what it is."""
    if (found := _SAME.match(text)) is None:
        return text
    number, value = found.groups()
    return f"{number} can be computed" if number == value else f"{number} = {value}"


def _sources(number: fx.Node, paths: Sequence[str]) -> str:
    """What a number is read out of: the path of an input, or the inputs that its tensor is computed from."""
    inputs = [node for node in number.graph.nodes if node.op == "placeholder"]
    needed = needed_by([number])
    found = [path for node, path in zip(inputs, paths, strict=True) if node in needed]
    return found[0] if number.args[0] in inputs else f"({', '.join(found)} as updated)"


def _slice(numbers: Sequence[fx.Node | str], readings: Readings, roles: Sequence[Role]) -> ReadOut:
    """The ops that compute `numbers`, on inputs that are known before the step."""
    nodes = [item for item in numbers if isinstance(item, fx.Node)]
    names = [item for item in numbers if isinstance(item, str)]
    needed = needed_by(nodes)
    inputs = [node for node in nodes[0].graph.nodes if node.op == "placeholder"] if nodes else []
    of_program = {node: position for position, node in enumerate(inputs) if node in needed}
    if any(roles[position] not in _READABLE for position in of_program.values()):
        raise DataDependentError(
            "the step branches in Python on the value of a tensor",
            where=origin(nodes[0]),
            hint="use torch.where or torch.cond, or move the test out of build()",
        )
    graph = fx.Graph()
    positions = sorted({*of_program.values(), *readings.program.positions(names)})
    placed = {position: named_input(graph, f"input_{position}") for position in positions}
    copies = {node: placed[position] for node, position in of_program.items()}
    for node, copied in copies.items():
        copied.meta = dict(node.meta)
        forget_torch_meta(copied)
    constants: dict[str, Any] = {}
    owner = nodes[0].graph.owning_module if nodes else None
    for node in nodes[0].graph.nodes if nodes else ():
        if node in needed and node not in copies:
            if is_random(node.target):
                raise DataDependentError("the step branches in Python on a random number", where=origin(node))
            if node.op == "get_attr":
                constants[str(node.target)] = getattr(owner, str(node.target))
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
            forget_torch_meta(copies[node])
    read = readings.program.copy_into(graph, names, placed, constants)
    graph.output(tuple(copies[item] if isinstance(item, fx.Node) else read[item] for item in numbers))
    return ReadOut(tuple(positions), fx.GraphModule(constants, graph))
