"""What the state of a graph consists of, each part under its key.

Modules stand under the names of their attributes. All other keys have a dot, so that no module can have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monograph.capture.optimizers.first_state import FirstState
from monograph.compiler import Build
from monograph.ir.state_store import StateStore
from monograph.settings import Settings
from monograph.state.find import Owned
from monograph.state_dict.attributes import attributes_part
from monograph.state_dict.gradients import gradients_part
from monograph.state_dict.kinds import average_part, module_part, object_part, scheduler_part, value_part
from monograph.state_dict.loading import Loading, Part, Stateful, mapping
from monograph.state_dict.optimizers import optimizer_part
from monograph.state_dict.random import random_part

ABOUT = "graph.about"


@dataclass(frozen=True)
class Contents:
    """What a graph holds that has state."""

    name: str  # of the class
    settings: Settings
    owned: Owned
    store: StateStore
    declared: FirstState
    builds: Sequence[Build]
    registered: Mapping[str, Stateful]
    known_tensors: set[str] = field(default_factory=set)  # paths of loaded attributes
    python_random: bool = False


def graph_parts(contents: Contents) -> dict[str, Part]:
    """The parts in the order in which they are loaded: the random state comes after what may draw from it."""
    owned, store = contents.owned, contents.store
    parts = {name: module_part(name, module) for name, module in owned.modules.items()}
    for index, held in enumerate(owned.optimizers):
        parts[held.name] = optimizer_part(held.name, held.optimizer, contents.declared)
        if held.scheduler is not None:
            parts[f"scheduler.{index}"] = scheduler_part(f"scheduler.{index}", held.scheduler)
    if owned.scaler is not None:
        parts["graph.scaler"] = object_part("graph.scaler", owned.scaler)
    parts |= {f"ema.{item.path}": average_part(f"ema.{item.path}", item) for item in owned.averages}
    parts["graph.tensors"] = attributes_part("graph.tensors", owned, contents.builds, contents.known_tensors)
    parts["graph.gradients"] = gradients_part("graph.gradients", owned, kept=contents.settings.keep_gradients)
    parts["graph.steps"] = value_part(lambda: store.steps, lambda value: setattr(store, "steps", value), int)
    parts |= {
        f"state.{name}": object_part(f"state.{name}", item) for name, item in contents.registered.items()
    }
    parts["graph.rng"] = random_part(
        "graph.rng", owned, contents.registered, python_random=contents.python_random
    )
    parts[ABOUT] = _about_part(contents)
    return parts


def _about_part(contents: Contents) -> Part:
    """Which class, backend, programs and kinds of optimizers and schedulers the state comes from."""
    held = contents.owned.optimizers
    kinds = {item.name: _kind(item.optimizer) for item in held}
    schedulers = {
        f"scheduler.{index}": _kind(item.scheduler)
        for index, item in enumerate(held)
        if item.scheduler is not None
    }

    def read() -> dict[str, Any]:
        return {
            "graph": contents.name,
            "backend": contents.builds[-1].backend if contents.builds else contents.settings.backend,
            "programs": [build.program.digest for build in contents.builds],
            "optimizers": kinds,
            "schedulers": schedulers,
        }

    def load(value: Any, loading: Loading) -> None:
        about = mapping(value or {})
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
