"""Programs as JSON, and back: each op by its exact name, each argument by its type. Reading makes values only.

An argument that is a string is the name of a node. None, a bool, an int of 64 bits, a finite float and a list are
themselves; everything else is an object with one key, its kind.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn

from monograph.artifact.bounds.checks import bounded, formed
from monograph.artifact.programs.operators import name_of, op_of
from monograph.artifact.programs.values import value_from_json, value_to_json
from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, LEAVES_TO_JSON, MAX_INT, Json, check, list_of, typed
from monograph.compat.ops import OpOverload, named_input
from monograph.compat.traces.nodes import graph_module
from monograph.ir.meta import (
    grad_mode,
    origin,
    set_grad_mode,
    set_origin,
    set_value,
    value,
)
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.sizes.size import Size
from monograph.user_code.lines import Origin

MAX_NODES: Final = 1_000_000
_MAX_DEPTH: Final = 20  # of lists in arguments, and of branches in branches
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,500}")
_WORD: Final = re.compile(r"[A-Za-z_ ,.>-]{0,60}")  # "none", "trunc", "ij,jk->ik": what ops take as strings
GRAPH_KEYS: Final = ("given", "origins", "nodes", "results")
PROGRAM_KEYS: Final = ("name", "parts", "inputs", *GRAPH_KEYS, "outputs")
_TAKEN: Final = frozenset({"aten", "torch", "math", "operator", "device", "mark"})
_OF_TABLES: Final = re.compile(r"op[0-9]+_.*")  # the names of ops in generated code
_FORMATS: Final = {
    str(item).removeprefix("torch."): item
    for item in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}
_LAYOUTS: Final = {"strided": torch.strided}


def program_to_json(program: Program) -> Json:
    """A program with its parts. `Refused` if an op or an argument has no place in an artifact. Sizes that vary stay `Size`."""
    return {
        "name": program.name,
        "parts": [program_to_json(part) for part in program.parts],
        "inputs": [[port.name, port.role.value, port.path] for port in program.inputs],
        **graph_to_json(program.module),
        "outputs": [[port.name, port.role.value, port.path] for port in program.outputs],
    }


def graph_to_json(module: fx.GraphModule) -> dict[str, Json]:
    """The nodes of a graph and what it returns, each value described; whoever calls it names its placeholders."""
    given = [value_to_json(value(node)) for node in module.graph.find_nodes(op="placeholder")]
    origins: dict[Origin, int] = {}
    nodes = [
        _node_to_json(node, module, origins)
        for node in module.graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    results = _argument_to_json(module.graph.output_node().args[0], "the output")
    places = [[item.phase, item.module, os.path.basename(item.file), item.line] for item in origins]
    return {"given": given, "origins": places, "nodes": nodes, "results": results}


def program_from_json(value: Json, *, trust: bool) -> Program:
    """The program that a JSON says. `Damaged` for whatever is no program; its descriptions are not checked yet."""
    return _program(value, trust=trust, depth=2)


def graph_from_json(
    value: Mapping[str, Json], names: list[str], *, trust: bool, parts: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """The graph of `graph_to_json` with placeholders of these names."""
    return _Reader(trust, dict(parts or {})).graph(value, names)


# --- to JSON ---------------------------------------------------------------------------------------------------


def _node_to_json(node: fx.Node, module: fx.GraphModule, origins: dict[Origin, int]) -> Json:
    place = origin(node)
    known = Origin(place.file, place.line, place.module, place.phase)
    row: list[Json] = [node.name, _target_to_json(node, module)]
    row.append([_argument_to_json(item, node.name) for item in node.args])
    row.append({key: _argument_to_json(item, node.name) for key, item in node.kwargs.items()})
    row += [origins.setdefault(known, len(origins)), value_to_json(value(node))]
    if (enabled := grad_mode(node)) is not None:
        row.append(enabled)
    return row


def _target_to_json(node: fx.Node, module: fx.GraphModule) -> Json:
    if node.op == "call_module":
        return {"part": str(node.target)}
    if node.op == "get_attr":
        branch = getattr(module, str(node.target))
        if not isinstance(branch, fx.GraphModule):
            raise Refused(f"the step holds {node.target}, a {type(branch).__name__}, outside of its inputs")
        names = [item.name for item in branch.graph.find_nodes(op="placeholder")]
        return {"branch": {"inputs": names, **graph_to_json(branch)}}
    if node.op != "call_function":
        raise Refused(f"the step calls a method by its name, {node.target}, which an artifact cannot hold")
    return name_of(node.target)


def _argument_to_json(item: Any, owner: str) -> Json:
    if isinstance(item, fx.Node):
        return item.name
    if isinstance(item, (torch.Size, list)):
        return [_argument_to_json(part, owner) for part in item]
    if isinstance(item, tuple):
        return {"tuple": [_argument_to_json(part, owner) for part in item]}
    if isinstance(item, slice):
        return {"slice": [_argument_to_json(part, owner) for part in (item.start, item.stop, item.step)]}
    if isinstance(item, torch.memory_format):
        return {"memory_format": str(item).removeprefix("torch.")}
    if isinstance(item, torch.layout):
        return {"layout": str(item).removeprefix("torch.")}
    if type(item) is str:
        return {"str": item}
    if isinstance(item, Size):
        return item
    leaf = LEAVES_TO_JSON.get(type(item))
    if leaf is None:
        raise Refused(f"{owner} has an argument of type {type(item).__name__}, which an artifact cannot hold")
    return leaf(item)


# --- and back --------------------------------------------------------------------------------------------------


def _program(value: Json, *, trust: bool, depth: int) -> Program:
    check(depth > 0, "a program has parts of parts")
    check(type(value) is dict and tuple(value) == PROGRAM_KEYS, "a program has unknown or missing keys")
    name = _identifier(value["name"])
    parts = tuple(_program(part, trust=trust, depth=depth - 1) for part in list_of(value["parts"]))
    check(len({part.name for part in parts}) == len(parts), "a program has two parts of one name")
    inputs, outputs = _ports(value["inputs"]), _ports(value["outputs"])
    modules = {part.name: part.module for part in parts}
    module = graph_from_json(value, [port.name for port in inputs], trust=trust, parts=modules)
    return Program(name, module, inputs, outputs, parts)


def _ports(value: Json) -> tuple[Port, ...]:
    found = []
    for row in list_of(value):
        name, role, path = list_of(row, 3)
        check(type(role) is str and role in set(Role), f"a port has the unknown role {role!r}")
        found.append(Port(_identifier(name), Role(role), typed(path, str)))
    return tuple(found)


def _identifier(value: Json) -> str:
    fits = type(value) is str and _NAME.fullmatch(value) is not None and not keyword.iskeyword(value)
    check(
        fits and value not in _TAKEN and not _OF_TABLES.fullmatch(value), f"{value!r} is no name of a value"
    )
    name: str = value
    return name


def _keyword(value: str) -> str:
    check(_NAME.fullmatch(value) is not None and not keyword.iskeyword(value), f"{value!r} is no keyword")
    return value


@dataclass
class _Reader:
    """Reads one graph."""

    trust: bool
    parts: dict[str, nn.Module]
    depth: int = _MAX_DEPTH
    nodes: dict[str, fx.Node] = field(default_factory=dict)

    def graph(self, value: Mapping[str, Json], names: list[str]) -> fx.GraphModule:
        check(self.depth > 0, "a program has branches in branches without an end")
        graph, root = fx.Graph(), nn.Module()
        for name, part in self.parts.items():
            root.add_module(name, part)
        places = [self._origin(row) for row in list_of(value["origins"])]
        rows = list_of(value["nodes"])
        check(len(rows) <= MAX_NODES, "a program has too many nodes")
        for name, given in zip(names, list_of(value["given"], len(names)), strict=True):
            node = named_input(graph, _identifier(name))
            set_value(node, value_from_json(given))
            self._add(name, node)
        for row in rows:
            self._read_node(row, graph, root, places)
        graph.output(self.argument(value["results"]))
        return graph_module(root, graph)

    def _read_node(self, row: Json, graph: fx.Graph, root: nn.Module, places: list[Origin]) -> None:
        check(type(row) is list and len(row) in (6, 7), "a program has a node with a wrong description")
        target, args, kwargs, place, described = row[1:6]
        name = _identifier(row[0])
        check(type(place) is int and 0 <= place < len(places), f"{name} has an unknown origin")
        given = tuple(self.argument(item) for item in list_of(args))
        named = {_keyword(key): self.argument(item) for key, item in typed(kwargs, dict).items()}
        if type(target) is str:
            op = op_of(target, trust=self.trust)
            if isinstance(op, OpOverload) and not self.trust:
                given, named = bounded(graph, name, op, given, named, places[place])
            node = graph.create_node("call_function", op, given, named, name)
        else:
            check(type(target) is dict and len(target) == 1, f"{name} is no op")
            ((kind, what),) = target.items()
            check(kind in ("part", "branch"), f"{name} is of the unknown kind {kind!r}")
            check(not named and not (given and kind == "branch"), f"{name} has arguments that it cannot have")
            if kind == "part":
                check(type(what) is str and what in self.parts, f"{name} calls an unknown part")
                node = graph.create_node("call_module", what, given, {}, name)
            else:
                root.add_module(name, self._branch(what))
                node = graph.create_node("get_attr", name, (), {}, name)
        set_origin(node, places[place])
        set_value(node, value_from_json(described))
        if len(row) == 7:
            set_grad_mode(node, typed(row[6], bool))
        self._add(name, node)
        if not self.trust:
            self.nodes[name] = formed(graph, node, places[place])

    def _branch(self, value: Json) -> fx.GraphModule:
        check(
            type(value) is dict and tuple(value) == ("inputs", *GRAPH_KEYS),
            "a branch has unknown or missing keys",
        )
        names = [_identifier(name) for name in list_of(value["inputs"])]
        return _Reader(self.trust, {}, self.depth - 1).graph(value, names)

    def _add(self, name: str, node: fx.Node) -> None:
        check(node.name == name and name not in self.nodes, f"a program has two values with the name {name}")
        self.nodes[name] = node

    def _origin(self, row: Json) -> Origin:
        phase, module, file, line = list_of(row, 4)
        fits = type(phase) is str and type(module) is str and type(file) is str and type(line) is int
        check(fits and 0 <= line <= MAX_INT, "a program has a wrong origin")
        return Origin(os.path.basename(file), line, module, phase)

    def argument(self, value: Json, depth: int = _MAX_DEPTH) -> Any:
        """An argument of an op."""
        check(depth > 0, "an argument is nested too deep")
        kind = type(value)
        if kind is str:
            node = self.nodes.get(value)
            if node is None:
                raise Damaged(f"a program reads {value[:100]!r} before it is made")
            return node
        if kind is list:
            return [self.argument(item, depth - 1) for item in value]
        if kind is int:
            check(-MAX_INT <= value <= MAX_INT, "an argument is too large a number")
        if kind is not dict:
            return value
        check(len(value) == 1, "an argument does not say one kind")
        ((tag, payload),) = value.items()
        if tag in ("tuple", "slice"):
            items = [self.argument(item, depth - 1) for item in list_of(payload)]
            check(tag == "tuple" or len(items) == 3, "a slice has three parts")
            return tuple(items) if tag == "tuple" else slice(*items)
        if tag == "str" and self.trust:
            return typed(payload, str)
        decode = _DECODERS.get(tag) or LEAVES_FROM_JSON.get(tag)
        check(decode is not None, f"an argument is of the unknown kind {tag!r}")
        return decode(payload)  # type: ignore[misc]


def _word(payload: Json) -> str:
    text: str = typed(payload, str)
    check(_WORD.fullmatch(text) is not None, f"an argument is the text {text[:60]!r}")
    return text


def _of_table(table: Mapping[str, Any]) -> Callable[[Json], Any]:
    def decode(payload: Json) -> Any:
        check(type(payload) is str and payload in table, f"an argument is {str(payload)[:60]!r}")
        return table[payload]

    return decode


_DECODERS: Final[Mapping[str, Callable[[Json], Any]]] = {
    "str": _word,
    "memory_format": _of_table(_FORMATS),
    "layout": _of_table(_LAYOUTS),
}
