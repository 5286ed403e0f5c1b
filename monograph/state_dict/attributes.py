"""Attributes and buffers that steps set and that no state dict of torch holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from monograph.compiler import Build
from monograph.ir.call.tree import flatten, unflatten
from monograph.state.find import Owned
from monograph.state_dict.loading import Loading, Part, mapping
from monograph.state_dict.merge import merged, settled
from monograph.state_dict.places import (
    Place,
    all_places,
    changed_places,
    early_places,
    has_own_memory,
    new_place,
    num_holders,
    without_numpy,
)


def attributes_part(name: str, owned: Owned, builds: Sequence[Build], known: set[str]) -> Part:
    """Attributes of modules, and buffers that are not persistent, if a step changes them; all while there is no build.

    `known` are the paths of those that were loaded: the step that would show that it changes them may not come again.
    """

    def read() -> dict[str, Any] | None:
        places = all_places(owned)
        paths = changed_places(builds, places, owned) if builds else early_places(places)
        return {
            path: _detached(places[path].value) for path in sorted({*paths, *known} & places.keys())
        } or None

    def load(value: Any, loading: Loading) -> None:
        given, places = mapping({} if value is None else value), all_places(owned)
        changed = changed_places(builds, places, owned) if builds else set()
        loading.missing += [f"{name}/{path}" for path in sorted(changed - given.keys())]
        modules, holders = owned.named_modules(), num_holders(owned, places)
        for path, saved in given.items():
            place = places.get(path) or new_place(path, modules)
            if place is None:
                loading.unexpected.append(f"{name}/{path}")
                continue
            if not builds:  # later, what steps have added since goes again
                saved = _with_entries(place.value, saved, f"{name}/{path}", loading)
            loading.wrong += place.misfits(saved, f"{name}/{path}")
            in_place = path in places and has_own_memory(path, given, places, holders)
            new = merged(place.value if in_place else None, saved, loading)
            loading.commits += [partial(_put, place, new), partial(known.add, path)]

    return Part(read, load, optional=True)


def _with_entries(live: Any, saved: Any, path: str, loading: Loading) -> Any:
    """A saved dict with the entries that the graph begins with; those that are missing are noted."""
    if not isinstance(live, dict) or type(saved) is not type(live):
        return saved
    missing = [key for key in live if key not in saved]
    loading.missing += [f"{path}[{key!r}]" for key in missing]
    made = copy.copy(saved)
    made.update({key: live[key] for key in missing})
    made.update(
        {
            key: _with_entries(live[key], item, f"{path}[{key!r}]", loading)
            for key, item in saved.items()
            if key in live
        }
    )
    return made


def _put(place: Place, value: Any) -> None:
    place.table[place.name] = settled(value)


def _detached(value: Any) -> Any:
    leaves: list[Any] = []
    tree = flatten(value, leaves)
    return unflatten(
        tree, iter([x.detach() if isinstance(x, torch.Tensor) else without_numpy(x) for x in leaves])
    )
