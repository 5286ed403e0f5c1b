"""A part of a step: some of its ops as a program that other parts and the caller give values to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from monograph.compat.ops import named_input
from monograph.compat.traces.nodes import graph_module
from monograph.errors import DistributedError
from monograph.ir.meta import TensorMeta, origin, plain, set_value, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program


@dataclass(frozen=True)
class Part:
    """A program of some ops. `given` and `made` are nodes of the graph that it was cut from: inputs of that, or values.

    What is made comes with its port, or with None if it is a value for other parts.
    """

    program: Program
    given: tuple[fx.Node, ...]
    made: tuple[tuple[fx.Node, Port | None], ...]


def part_of(
    name: str,
    source: Program,
    nodes: Collection[fx.Node],
    ports: Mapping[fx.Node, Port],
    made: Sequence[tuple[fx.Node, Port | None]],
) -> Part:
    """The part with these nodes of a program. `ports` are those of the inputs of the program."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    body = [node for node in source.graph.nodes if node in nodes and node.op not in ("placeholder", "output")]
    inside = set(body)
    read = {item for node in body for item in node.all_input_nodes} | {item for item, _ in made}
    given = [node for node in source.graph.nodes if node in read and node not in inside]
    inputs = []
    for node in given:
        copies[node] = named_input(graph, node.name)
        if node not in ports:
            check_sent(node)
        set_value(copies[node], plain(value(node)) if node not in ports else value(node))
        known = ports.get(node, Port("", Role.USER, f"value/{node.name}"))
        inputs.append(Port(copies[node].name, known.role, known.path))
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[item] for item, _ in made))
    outputs = [
        Port(f"{name}_{index}", Role.USER, f"value/{item.name}")
        if port is None
        else Port(f"{name}_{index}", port.role, port.path)
        for index, (item, port) in enumerate(made)
    ]
    module = graph_module(source.module, graph)
    return Part(Program(name, module, tuple(inputs), tuple(outputs)), tuple(given), tuple(made))


def check_sent(node: fx.Node) -> TensorMeta:
    """What is known of a value that goes from one part to another. Raises DistributedError for what is no tensor."""
    described = value(node)
    if isinstance(described, TensorMeta) and not described.varies:
        return described
    place: Any = origin(node)
    what = "a tensor whose size varies" if isinstance(described, TensorMeta) else "a number of Python"
    raise DistributedError(
        f"one stage of the pipeline makes {what} that another one reads: {node.name}",
        where=place if place.file else None,
        hint="compute it in the stage that reads it; config.dynamic(False) keeps sizes numbers",
    )
