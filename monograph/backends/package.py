"""A program with its state inside, compiled to a package that libtorch runs without Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph.backends.flat import described
from monograph.backends.inductor import prepared, translated
from monograph.compat.inductor import loading as _inductor
from monograph.compat.inductor.disk_cache import kept
from monograph.compat.ops import named_input
from monograph.errors import BackendError
from monograph.ir.meta import TensorMeta, origin, output_nodes
from monograph.ir.own_ops import APART
from monograph.ir.printer import spell_target
from monograph.ir.program import Program
from monograph.plan.alias import aliases
from monograph.settings import Settings
from monograph.user_code.lines import Origin

aten = torch.ops.aten
Place = int | str  # an argument by its number, or state by its path
View = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, distance from the beginning


@dataclass(frozen=True)
class Given:
    """A result: an output of the program, or what a place holds once all is written, or a view of that."""

    output: int = -1
    place: Place = ""
    view: View | None = None


@dataclass(frozen=True)
class PackageInterface:
    """Where a program's inputs come from, where its outputs are written, and what is returned.

    `arguments` describe what a call gives, also what no input takes.
    """

    arguments: tuple[TensorMeta, ...]
    sources: tuple[Place, ...]
    state: Mapping[str, torch.Tensor]
    writes: tuple[tuple[int, Place], ...]
    results: tuple[Given, ...]


def compile_package(
    program: Program, settings: Settings, interface: PackageInterface, notes: Mapping[str, str], goal: Path
) -> None:
    """Compile a program after its passes to a file. Raises BackendError, naming the op and the user's line."""
    program = prepared(program, settings)[0][-1].program
    for node in program.graph.find_nodes(op="placeholder"):
        described(node)  # a generator is refused
    names = dict(zip(_names(interface), map(_quoted, interface.state), strict=True))
    examples = [(item.shape, item.stride, item.dtype, item.device) for item in interface.arguments]

    def compiled(*, copied: bool = False) -> tuple[str, ...]:
        module = _with_state(program, interface, all_apart=copied)
        return _inductor.compile_to_package(module, names, examples, notes, goal, kept, copied=copied)

    try:
        try:
            missing = compiled()
        except Exception as error:
            if not _inductor.is_unordered(error):
                raise
            missing = compiled(copied=True)
    except Exception as error:
        raise translated(error, program) from error
    if missing:
        name = missing[0].replace("::", ".")
        spellings = (f"torch.ops.{name}", f"torch.ops.{name}.default")
        called = [node for node in program.ops() if spell_target(node.target) in spellings]
        raise BackendError(
            f"{name} is implemented in Python or in another library, which no package can hold",
            where=origin(called[0]) if called else Origin(),
            hint="mg.save(graph, path) stores the step for Python",
        )


def _quoted(path: str) -> str:
    """A path as a string of C++."""
    return path.replace("\\", "\\\\").replace('"', '\\"')


def _with_state(program: Program, interface: PackageInterface, *, all_apart: bool = False) -> fx.GraphModule:
    """The graph over the arguments alone: state is in buffers, new values are copied into the old at the end.

    With `all_apart`, all that is written is computed first: kernels that write cannot fail then.
    """
    graph, root = fx.Graph(), dict[str, Any]()
    places: dict[Place, fx.Node] = {
        number: named_input(graph, f"argument_{number}") for number in range(len(interface.arguments))
    }
    for (path, tensor), name in zip(interface.state.items(), _names(interface), strict=True):
        root[name] = tensor
        places[path] = graph.get_attr(name)
    inputs = program.graph.find_nodes(op="placeholder")
    new = {node: places[source] for node, source in zip(inputs, interface.sources, strict=True)}
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "output"):
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = {}
        if node.op == "get_attr":
            root[node.target] = getattr(program.module, node.target)
    outputs = _apart(program, interface)

    def apart(node: fx.Node) -> fx.Node:
        return graph.call_function(APART, (node, len(graph.nodes)))

    made = {
        position: apart(new[node]) if shared or all_apart else new[node]
        for position, (node, shared) in outputs.items()
    }
    for position, place in interface.writes:
        graph.call_function(aten.copy_.default, (places[place], made[position]))
    results = [
        made[item.output] if item.output >= 0 else apart(_viewed(graph, places[item.place], item.view))
        for item in interface.results
    ]
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


def _names(interface: PackageInterface) -> list[str]:
    return [f"state_{number}" for number in range(len(interface.state))]


def _viewed(graph: fx.Graph, place: fx.Node, view: View | None) -> fx.Node:
    return place if view is None else graph.call_function(aten.as_strided.default, (place, *view))


def _apart(program: Program, interface: PackageInterface) -> dict[int, tuple[fx.Node, bool]]:
    """The outputs that are needed, each with whether it may share memory with an input or with another one."""
    known, outputs = aliases(program), output_nodes(program.graph)
    needed = [position for position, _ in interface.writes]
    needed += [item.output for item in interface.results if item.output >= 0]
    shown = Counter(storage for position in needed for storage in known.possible[outputs[position].name])
    given = {
        storage
        for node in program.graph.find_nodes(op="placeholder")
        for storage in known.possible[node.name]
    }
    return {
        position: (node, any(item in given or shown[item] > 1 for item in known.possible[node.name]))
        for position in needed
        for node in (outputs[position],)
    }
