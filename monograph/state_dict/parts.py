"""What the state of a graph consists of, each part under its key.

Modules stand under the names of their attributes. All other keys have a dot, so that no module can have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monograph.internals.internals import Internals
from monograph.internals.mistakes import left_schedulers
from monograph.state.find import Owned
from monograph.state_dict.attributes import attributes_part
from monograph.state_dict.gradients import gradients_part
from monograph.state_dict.kinds import average_part, module_part, object_part, scheduler_part, value_part
from monograph.state_dict.loading import LeftOut, Loading, Part, load_parts, mapping, read_parts
from monograph.state_dict.of_ranks import with_others, without_others
from monograph.state_dict.optimizers import optimizer_part
from monograph.state_dict.places import memories
from monograph.state_dict.random import random_part
from monograph.user_code.lines import warn_at_user_line

ABOUT = "graph.about"


def read_state(graph: Internals, *, python_random: bool = False) -> dict[str, Any]:
    """The state of a graph. Its tensors are the live ones."""
    graph.check_whole()
    with graph.store.lock:
        parts = _parts(graph, graph.owned(), python_random=python_random)
        return without_others(graph, read_parts(parts))


def load_state(graph: Internals, state_dict: Mapping[str, Any], *, strict: bool) -> LeftOut:
    """Let a graph take over a state."""
    with graph.store.lock:
        owned, steps = graph.owned(), graph.store.steps
        parts = _parts(graph, owned)
        left_out = load_parts(parts, with_others(graph, state_dict, parts), strict=strict)
        left_schedulers(graph.registry.optimizers)
        if not left_out.missing_keys:
            graph.store.torn = ""
        if graph.store.steps < steps and _are_own(owned, state_dict):
            warn_at_user_line(
                f"{graph.name}: load_state_dict() got the graph's own tensors, as of step {steps}, with the counters of step "
                f"{graph.store.steps}: state_dict() gives live tensors, which later steps change; to go back to a step keep "
                "copy.deepcopy(graph.state_dict()), or save it"
            )
        return left_out


def _are_own(owned: Owned, state_dict: Mapping[str, Any]) -> bool:
    """True if all weights of a state are in the memory of those that the modules have."""
    pairs = [
        (memories([own]), saved.get(key))
        for name, module in owned.modules.items()
        if isinstance(saved := state_dict.get(name), Mapping)
        for key, own in module.state_dict().items()
        if isinstance(own, torch.Tensor)
    ]
    weights = [(memory, given) for memory, given in pairs if memory]
    return bool(weights) and all(
        isinstance(given, torch.Tensor) and memories([given]) == memory for memory, given in weights
    )


def _parts(graph: Internals, owned: Owned, *, python_random: bool = False) -> dict[str, Part]:
    """The parts in the order in which they are loaded: the random state comes after what may draw from it."""
    graph.registry.check_not_swapped("saves or loads its state")
    store, registry = graph.store, graph.registry
    parts = {name: module_part(name, module) for name, module in owned.modules.items()}
    for index, one in enumerate(owned.optimizers):
        parts[one.name] = optimizer_part(one.name, one.optimizer, graph.first_state)
        if one.scheduler is not None:
            parts[f"scheduler.{index}"] = scheduler_part(f"scheduler.{index}", one.scheduler)
    if owned.scaler is not None:
        parts["graph.scaler"] = object_part("graph.scaler", owned.scaler)
    parts |= {f"ema.{item.path}": average_part(f"ema.{item.path}", item) for item in owned.averages}
    parts["graph.tensors"] = attributes_part("graph.tensors", owned, graph.builds, registry.known_tensors)
    parts["graph.gradients"] = gradients_part("graph.gradients", owned, kept=graph.settings.keep_gradients)
    parts["graph.steps"] = value_part(lambda: store.steps, lambda value: setattr(store, "steps", value), int)
    registered = registry.registered
    parts |= {f"state.{name}": object_part(f"state.{name}", item) for name, item in registered.items()}
    parts["graph.rng"] = random_part("graph.rng", owned, registered, python_random=python_random)
    parts[ABOUT] = _about_part(graph, owned)
    return parts


def _about_part(graph: Internals, owned: Owned) -> Part:
    """Which class, backend, programs and kinds of optimizers and schedulers the state comes from."""
    held, builds = owned.optimizers, graph.builds
    kinds = {item.name: _kind(item.optimizer) for item in held}
    schedulers = {
        f"scheduler.{index}": _kind(item.scheduler)
        for index, item in enumerate(held)
        if item.scheduler is not None
    }

    def read() -> dict[str, Any]:
        return {
            "graph": type(owned.owner).__name__,
            "backend": builds[-1].backend
            if builds and not graph.settings.is_upgraded
            else graph.settings.backend,
            **({} if (swapped := graph.upgrades.swapped_at) is None else {"swapped_at": swapped}),
            "programs": [build.program.digest for build in builds],
            "optimizers": kinds,
            "schedulers": schedulers,
        }

    def load(value: Any, loading: Loading) -> None:
        about = mapping(value or {})
        loading.commits.append(lambda: setattr(graph.upgrades, "swapped_at", about.get("swapped_at")))
        saved = {**mapping(about.get("optimizers", {})), **mapping(about.get("schedulers", {}))}
        loading.wrong += [
            f"{name} is the state of {saved[name]}; here it is {kind}"
            for name, kind in {**kinds, **schedulers}.items()
            if name in saved and _class(saved[name]) != _class(kind)
        ]

    return Part(read, load, optional=True)


def _kind(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _class(kind: object) -> str:
    """The name without the module, which is another one for a script that is run and one that is imported."""
    return str(kind).rpartition(".")[2]
