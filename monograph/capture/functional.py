"""From a recorded step that changes tensors in place to a pure program: what changed becomes an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph._torch import (
    ORDERED,
    current_tracer,
    functional_tensors,
    spelling,
    trace,
    writes_to_inputs,
)
from monograph.ir.meta import origin, set_origin

_FUSED = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
_PROFILER = "torch.ops.profiler."


@dataclass(frozen=True)
class Functional:
    """A pure graph; `changed` lists the inputs whose new values follow the first `num_results` outputs."""

    module: fx.GraphModule
    num_results: int
    changed: tuple[int, ...]


def drop_profiler(graph: fx.Graph) -> None:
    """Erase the profiler's marks around optimizer steps."""
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and (spelling(node.target) or "").startswith(_PROFILER)
            and not node.users
        ):
            graph.erase_node(node)


def lift_constants(module: fx.GraphModule, known: Mapping[int, fx.Node]) -> list[torch.Tensor]:
    """Turn the tensors that a trace holds into placeholders behind the others, and list them in that order.

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
    """Turn the generators that a trace holds into placeholders behind the others."""
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


def unfuse_in_place(module: fx.GraphModule) -> None:
    """Rewrite `_fused_adam_` and its like to their functional overloads, each followed by copies.

    Functionalisation asserts on them, because one of their lists is empty.
    """
    graph = module.graph
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if node.op != "call_function" or name not in _FUSED:
            continue
        packet = getattr(torch.ops.aten, name.removesuffix("_"))
        functional = getattr(packet, node.target._overloadname)
        written = [
            argument.name
            for argument in node.target._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        positions = [argument.name for argument in node.target._schema.arguments]
        values = dict(zip(positions, node.args, strict=False)) | dict(node.kwargs)
        with graph.inserting_before(node):
            made = graph.call_function(functional, node.args, dict(node.kwargs))
            set_origin(made, origin(node))
            for index, argument in enumerate(written):
                _copy_back(graph, made, index, values[argument])
        graph.erase_node(node)


def _copy_back(graph: fx.Graph, made: fx.Node, index: int, targets: Any) -> None:
    results = graph.call_function(getitem, (made, index))
    for position, target in enumerate(targets):
        item = graph.call_function(getitem, (results, position))
        copy = graph.call_function(torch.ops.aten.copy_.default, (target, item))
        for node in (item, copy):
            set_origin(node, origin(made))


class _Replay(fx.Interpreter):
    """Runs a recorded step under a second trace and hands each op's origin on."""

    def __init__(self, module: fx.GraphModule, tracer: Any) -> None:
        super().__init__(module)
        self._current = None
        create = tracer.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            if self._current is not None and node.op in ("call_function", "call_method"):
                set_origin(node, origin(self._current))
            return node

        tracer.create_node = create_node

    def run_node(self, node: fx.Node) -> Any:
        self._current = node
        return super().run_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(ORDERED.get(target, target), args, kwargs)


def functionalise(module: fx.GraphModule, mode: Any, inputs: Sequence[Any]) -> Functional:
    """Trace a recorded step again under functional tensors with the same fake inputs; bitwise the same."""
    changed: list[int] = []
    num_results = 0

    def pure(*flat: Any) -> list[Any]:
        nonlocal num_results
        changed.clear()
        with torch.no_grad(), functional_tensors() as (wrap, unwrap):
            wrapped = [wrap(item) for item in flat]
            tracer = current_tracer()
            record_generators(tracer)
            results = _Replay(module, tracer).run(*wrapped)
            outputs = [unwrap(item) for item in results]
            num_results = len(outputs)
            for index, (before, item) in enumerate(zip(flat, wrapped, strict=True)):
                after = unwrap(item)
                if after is not before:
                    changed.append(index)
                    outputs.append(after)
        return outputs

    traced = trace(pure, mode, inputs)
    _keep_apart(traced, num_results)
    assert not any(writes_to_inputs(node.target) for node in traced.graph.nodes), (
        "functionalisation left a write"
    )
    return Functional(traced, num_results, tuple(changed))


def _keep_apart(module: fx.GraphModule, num_results: int) -> None:
    """Copy new state that is a view of an input, or is returned twice: write-backs must not read what they write."""
    graph = module.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    seen: set[fx.Node] = {item for item in results[:num_results] if isinstance(item, fx.Node)}
    for index in range(num_results, len(results)):
        item = results[index]
        if not isinstance(item, fx.Node) or not isinstance(item.meta.get("val"), torch.Tensor):
            continue
        if item in seen or _view_root(item) in inputs:
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (item,))
            copy.meta["val"] = item.meta["val"]
            set_origin(copy, origin(item))
            results[index] = item = copy
        seen.add(item)
    output.args = (results,)
    module.recompile()


def _view_root(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        aliased = schema is not None and any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in schema.arguments
        )
        if node.target is getitem or aliased:
            source = node.args[0]
            if isinstance(source, fx.Node):
                node = source
                continue
        break
    return node
