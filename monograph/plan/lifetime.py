"""How long values and their memory are needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from monograph.distributed.programs.collectives import held_for, read_by
from monograph.ir.meta import computes
from monograph.plan.alias import Aliases, Storage


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The node that makes a storage, and the last one that reads it; the output reads what is returned."""

    birth: str
    last_read: str


def frees(
    graph: fx.Graph, *, kept: Collection[int] = (), together: Mapping[str, str] = MappingProxyType({})
) -> dict[str, tuple[str, ...]]:
    """For each op the values that nothing reads after it. Inputs are the caller's and are not freed.

    The outputs at the positions `kept` are in the state already, and need not be held. Ops that run `together` are known by
    the last of them.
    """
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if computes(node):
            last_reader[node] = node
        for needed in held_for(node) if node.op != "output" else _returned(node, kept):
            if computes(needed):
                last_reader[needed] = node
    dead: dict[str, list[str]] = {}
    for made, reader in last_reader.items():
        if reader.op != "output":
            dead.setdefault(together.get(reader.name, reader.name), []).append(made.name)
    return {name: tuple(values) for name, values in dead.items()}


def _returned(output: fx.Node, kept: Collection[int]) -> list[fx.Node]:
    results: Any = output.args[0]
    return [item for index, item in enumerate(results) if isinstance(item, fx.Node) and index not in kept]


def lifetimes(graph: fx.Graph, memory: Aliases) -> Mapping[Storage, Lifetime]:
    """For each storage when it is read last, through any value that shows it or may show it.

    To make a view is no read; the reads of the view are.
    """
    last: dict[Storage, str] = {}
    for node in graph.nodes:
        if node.name not in memory.views:
            for needed in read_by(node):
                for storage in memory.possible[needed.name]:
                    last[storage] = node.name
        for storage in memory.certain.get(node.name, ()):
            last.setdefault(storage, node.name)
    return {storage: Lifetime(storage.maker, reader) for storage, reader in last.items()}
