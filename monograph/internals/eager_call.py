"""A call of a graph that runs build() itself."""

from __future__ import annotations

from typing import Any

from monograph.compat.modes import outside_of_modes
from monograph.eager import eager_step
from monograph.internals.internals import Internals
from monograph.internals.mistakes import left_schedulers
from monograph.internals.together import prepare
from monograph.ir.call.signature import read_call
from monograph.state.find import kept_parameters


def eager_call(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the step in eager mode, on the arguments as they are."""
    graph.check_usable()
    args, kwargs = graph.formed(args, kwargs)
    read = read_call(args, kwargs, graph.names)
    settings = graph.settings
    with graph.store.lock, graph.in_build():
        request = graph.request(read)
        with outside_of_modes():  # what watches the step
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
    return returned
