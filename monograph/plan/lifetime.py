"""When a value is read for the last time."""

from __future__ import annotations

from torch import fx

_COMPUTED = ("call_function", "call_method", "call_module")


def frees(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """For each op the values that nothing reads after it. Inputs are the caller's and are not freed."""
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op in _COMPUTED:
            last_reader[node] = node
        for needed in node.all_input_nodes:
            if needed.op in _COMPUTED:
                last_reader[needed] = node
    dead: dict[str, list[str]] = {}
    for made, reader in last_reader.items():
        if reader.op != "output":
            dead.setdefault(reader.name, []).append(made.name)
    return {name: tuple(values) for name, values in dead.items()}
