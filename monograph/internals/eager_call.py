"""A call of a graph that runs build() itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build
from monograph.distributed.pipeline.bound import pipeline_of
from monograph.distributed.pipeline.whole import whole_model
from monograph.eager import eager_step
from monograph.internals.internals import Internals
from monograph.internals.mistakes import left_schedulers
from monograph.internals.together import prepare
from monograph.ir.call.signature import read_call
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.meta import TensorMeta, output_nodes, value
from monograph.state.find import kept_parameters


def eager_call(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the step in eager mode, on the arguments as they are."""
    graph.check_usable()
    args, kwargs = graph.formed(args, kwargs)
    read = read_call(args, kwargs, graph.names)
    settings = graph.settings
    if graph.registry.as_written and not graph.cache.all and settings.accumulation_steps == 1:
        settings = replace(settings, keep_gradients=True)  # nobody knows yet whether the function clears them
    with graph.store.lock:
        owned = graph.owned()
        with outside_of_modes():  # what watches the step
            pipeline = pipeline_of(owned, owned.named_modules(), settings)
        build = None if pipeline is None else _build_for(graph, args, kwargs)
        with graph.in_build():
            request = graph.request(read)
            with outside_of_modes():
                graph.together.meet_eagerly(graph.name, request)
                if settings.data_parallel is not None or settings.zero is not None:
                    prepare(request, graph.together)
            owned = request.owned
            staying = {id(parameter) for parameter in kept_parameters(owned, settings)}
            parameters = [
                p for module in owned.modules.values() for p in module.parameters() if id(p) not in staying
            ]
            kept = [parameter.grad for parameter in parameters]
            graph.probes.step = graph.store.steps
            for parameter in parameters:
                parameter.grad = None
            try:
                whole = (
                    nullcontext()
                    if pipeline is None or build is None
                    else whole_model(owned, settings, pipeline, build.captured.shares)
                )
                with whole:
                    returned, stepped = eager_step(request, (args, kwargs))
            finally:
                if not settings.keep_gradients:
                    for parameter, gradient in zip(parameters, kept, strict=True):
                        parameter.grad = gradient
            graph.store.steps += 1
            for registered in graph.registry.optimizers:
                if registered.scheduler is not None:
                    for _ in range(stepped[registered.name]):
                        registered.scheduler.step()
            left_schedulers(graph.registry.optimizers)
    return returned if build is None else _results_here(build, returned)


def _build_for(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
    """The build of a pipeline for this call: it says which rank has what."""
    with graph.first_state.hidden(graph.registry.optimizers):
        return graph.build_for(graph.read(args, kwargs), args, kwargs)


def _results_here(build: Build, returned: Any) -> Any:
    """The results of a pipeline as the graph gives them on this rank: those that are on another one are empty."""
    leaves: list[Any] = []
    tree = flatten(returned, leaves)
    outputs = output_nodes(build.stages[0].program.graph)
    places = build.executor.bound.output_of_each_result
    pairs = zip(leaves, places, strict=True)
    return unflatten(tree, iter([leaf if at is None else _here(leaf, outputs[at]) for leaf, at in pairs]))


def _here(leaf: Any, output: Any) -> Any:
    described = value(output) if isinstance(output, fx.Node) else None
    is_elsewhere = isinstance(described, TensorMeta) and described.shape[:1] == (0,) != leaf.shape[:1]
    return (
        torch.empty_strided((0, *leaf.shape[1:]), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        if is_elsewhere
        else leaf
    )
