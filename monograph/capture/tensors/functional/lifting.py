"""What a recorded step holds and is no op of it: tensors and generators become inputs, marks of the profiler go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import is_profiler_mark


def drop_profiler(graph: fx.Graph) -> None:
    """Erase the profiler's marks around optimizer steps."""
    for node in reversed(list(graph.nodes)):
        if is_profiler_mark(node.target) and not node.users:
            graph.erase_node(node)


def lift_constants(module: fx.GraphModule, known: Mapping[int, fx.Node]) -> list[torch.Tensor]:
    """Turn the tensors that a trace holds into placeholders after the others, and list them in that order.

    A tensor whose id is in `known` is an input already.
    """
    graph = module.graph
    lifted: list[torch.Tensor] = []
    placed = dict(known)
    anchor = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(
            tensor := _attribute(module, str(node.target)), torch.Tensor
        ):
            continue
        if id(tensor) not in placed:
            with graph.inserting_after(anchor[0]) if anchor else graph.inserting_before():
                anchor = [graph.placeholder(f"captured_{len(lifted)}")]
            anchor[0].meta["val"] = node.meta.get("val")
            placed[id(tensor)] = anchor[0]
            lifted.append(tensor)
        node.replace_all_uses_with(placed[id(tensor)])
        graph.erase_node(node)
    return lifted


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
    graph = module.graph
    lifted: dict[int, tuple[torch.Generator, fx.Node]] = {}
    anchor = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(
            item := _attribute(module, str(node.target)), torch.Generator
        ):
            continue
        if id(item) not in lifted:
            with graph.inserting_after(anchor[0]) if anchor else graph.inserting_before():
                anchor = [graph.placeholder(f"generator_{len(lifted)}")]
            lifted[id(item)] = (item, anchor[0])
        node.replace_all_uses_with(lifted[id(item)][1])
        graph.erase_node(node)
    return [item for item, _ in lifted.values()]


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found
