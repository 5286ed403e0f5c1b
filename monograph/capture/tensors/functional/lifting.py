"""What a recorded step holds and is no op of it: tensors and generators become inputs, marks of the profiler go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from monograph.compat.ops import is_profiler_mark, named_input

_Held = TypeVar("_Held", torch.Tensor, torch.Generator)


def drop_profiler(graph: fx.Graph) -> None:
    """Erase the profiler's marks around optimizer steps."""
    for node in reversed(list(graph.nodes)):
        if is_profiler_mark(node.target) and not node.users:
            graph.erase_node(node)


def lift_constants(module: fx.GraphModule, known: Mapping[int, fx.Node]) -> list[torch.Tensor]:
    """Turn the tensors that a trace holds into placeholders after the others, and list them in that order.

    A tensor whose id is in `known` is an input already.
    """
    return _lifted(module, torch.Tensor, "captured", known)


def record_generators(tracer: Any) -> None:
    """Let a trace hold explicit `torch.Generator` objects as attributes; `lift_generators` makes them inputs."""
    create = tracer.create_arg

    def create_arg(item: Any) -> Any:
        if not isinstance(item, torch.Generator):
            return create(item)
        name = f"generator_{id(item)}"
        setattr(tracer.root, name, item)
        return tracer.create_node("get_attr", name, (), {})

    tracer.create_arg = create_arg


def lift_generators(module: fx.GraphModule) -> list[torch.Generator]:
    """Turn the generators that a trace holds into placeholders after the others."""
    return _lifted(module, torch.Generator, "generator", {})


def _lifted(
    module: fx.GraphModule, kind: type[_Held], name: str, known: Mapping[int, fx.Node]
) -> list[_Held]:
    """Read what is of this kind from placeholders instead; those that are new are named, and listed in their order."""
    graph = module.graph
    lifted: list[_Held] = []
    placed = dict(known)
    anchor = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(item := _attribute(module, str(node.target)), kind):
            continue
        if id(item) not in placed:
            with graph.inserting_after(anchor[0]) if anchor else graph.inserting_before():
                anchor = [named_input(graph, f"{name}_{len(lifted)}")]
            if "val" in node.meta:
                anchor[0].meta["val"] = node.meta["val"]
            placed[id(item)] = anchor[0]
            lifted.append(item)
        node.replace_all_uses_with(placed[id(item)])
        graph.erase_node(node)
    return lifted


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found
