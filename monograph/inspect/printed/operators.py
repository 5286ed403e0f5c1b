"""OPERATOR lines: the ops of a program, each under the module it belongs to."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from monograph.inspect.printed.tree import Entry
from monograph.ir.meta import compute_nodes, origin, output_nodes, value
from monograph.ir.port import Port
from monograph.ir.printer import spell_target, spell_value
from monograph.ir.program import Program

SHOWN_OPS = 4  # of each phase
SHOWN_ARGUMENTS = 10
SHOWN_ITEMS = 4  # of a list among the arguments, and of several results
GRAPH = ""  # the place of what belongs to no module


def operators_by_module(
    program: Program, modules: Iterable[str], *, lines: bool = False
) -> dict[str, tuple[Entry, ...]]:
    """The OPERATOR lines of each module; those of no module in `modules` stand at the path "".

    With `lines` each has the user's lines that were recorded for it.
    """
    places: dict[fx.Node, str] = {}
    inputs: dict[fx.Node, str] = {}
    for item in program.programs:
        places |= {node: origin(node).module for node in compute_nodes(item.graph)} | _updates(item)
        inputs |= _input_paths(item)
    known, found = set(modules), dict[str, list[fx.Node]]()
    for node, place in places.items():
        if node.target is not operator.getitem:  # the place of a result among several is no work
            found.setdefault(place if place in known else GRAPH, []).append(node)
    return {place: tuple(_folded(nodes, inputs, lines)) for place, nodes in found.items()}


def _updates(program: Program) -> dict[fx.Node, str]:
    """The module of each op of an update: the one whose parameter it helps to update, if there is one only."""
    places: dict[fx.Node, str] = {}

    def reach(node: fx.Node, place: str) -> None:
        if origin(node).phase == "update":
            places[node] = place if places.get(node, place) == place else GRAPH

    outputs = output_nodes(program.graph)
    for index, port in program.updates():
        if isinstance(outputs[index], fx.Node):
            reach(outputs[index], _owner(port))
    for node in reversed(list(compute_nodes(program.graph))):
        if node in places:
            for needed in node.all_input_nodes:
                reach(needed, places[node])
    return places


def _owner(port: Port) -> str:
    """The module of the parameter that new state belongs to: `optimizer.0/model.fc.weight/step` to `model.fc`."""
    parts = port.path.split("/")
    return parts[min(1, len(parts) - 1)].rpartition(".")[0]


def _input_paths(program: Program) -> Mapping[fx.Node, str]:
    placeholders = program.graph.find_nodes(op="placeholder")
    return {node: port.path for node, port in zip(placeholders, program.inputs, strict=True)}


def _folded(nodes: Sequence[fx.Node], inputs: Mapping[fx.Node, str], lines: bool) -> Iterator[Entry]:
    """The first few ops of each phase, and how many more there are."""
    seen: Counter[str] = Counter()
    for node in nodes:
        phase = origin(node).phase
        seen[phase] += 1
        if seen[phase] <= SHOWN_OPS:
            stack = origin(node).stack if lines else ()
            place = f", location=({'; '.join(map(str, stack))})" if stack else ""
            yield Entry(f"OPERATOR:{node.name}:{_operation(node, inputs)}, {phase}{place}")
    more = [f"{count - SHOWN_OPS} more in {phase}" for phase, count in seen.items() if count > SHOWN_OPS]
    if more:
        yield Entry(f"OPERATOR:...:{', '.join(more)}")


def _operation(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str:
    arguments = [_spell(item, inputs) for item in node.args]
    arguments += [f"{key}={_spell(item, inputs)}" for key, item in node.kwargs.items()]
    op = spell_target(node.target).removesuffix(".default")
    return f"{op}({_first(arguments, SHOWN_ARGUMENTS)}) -> {_made(value(node))}"


def _spell(item: Any, inputs: Mapping[fx.Node, str]) -> str:
    """An argument: inputs by their path, a result among several as `op[2]`, long lists cut."""
    if isinstance(item, (list, tuple)):
        items = _first([_spell(entry, inputs) for entry in item], SHOWN_ITEMS)
        return f"[{items}]" if isinstance(item, list) else f"({items})"
    if not isinstance(item, fx.Node):
        return spell_value(item)
    if item.target is operator.getitem:
        return f"{_spell(item.args[0], inputs)}[{_spell(item.args[1], inputs)}]"
    return inputs.get(item, item.name)


def _made(described: Any) -> str:
    if isinstance(described, tuple):
        return f"({_first([_made(item) for item in described], SHOWN_ITEMS)})"
    return str(described)


def _first(items: Sequence[str], count: int) -> str:
    shown = list(items) if len(items) <= count + 1 else [*items[:count], f"... {len(items) - count} more"]
    return ", ".join(shown)
