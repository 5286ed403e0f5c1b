"""The random generators that decide how training goes on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from monograph.state.find import Owned
from monograph.state.random import RandomState, read_generators, restore_generators, set_random_state
from monograph.state_dict.loading import Loading, Part, mapping

_KEYS = ("cpu", "cuda", "generators", "python", "numpy")


def random_part(name: str, owned: Owned, registered: Mapping[str, object], *, python_random: bool) -> Part:
    """The states of torch's generators, of those that the graph and what it holds have, and of Python's if asked.

    A generator that the `load_state_dict()` of a registered object has set stays as it is: a loader of the user's own sets it
    to where its epoch began, to draw the same order again. A loader of torch's does not set its generator.
    """

    def read() -> dict[str, Any]:
        now = RandomState.now()
        found: dict[str, Any] = {"cpu": now.cpu}
        if now.devices:
            found["cuda"] = now.devices
        if generators := _generators(owned, registered):
            states = read_generators(list(generators.values()))
            found["generators"] = dict(zip(generators, states, strict=True))
        if python_random:
            found["python"] = now.python
            if now.numpy is not None:
                found["numpy"] = now.numpy
        return found

    def load(value: Any, loading: Loading) -> None:
        given, generators = mapping(value), _generators(owned, registered)
        saved = mapping(given.get("generators", {}), "a dict of generators")
        theirs = [path for path, item in generators.items() if item in loading.set_by_objects]
        saved = {path: state for path, state in saved.items() if path not in theirs}
        generators = {path: item for path, item in generators.items() if path not in theirs}
        loading.missing += [f"{name}/{key}" for key in ("cpu",) if key not in given]
        loading.missing += [f"{name}/generators/{path}" for path in generators if path not in saved]
        loading.unexpected += [f"{name}/{key}" for key in given if key not in _KEYS]
        loading.unexpected += [f"{name}/generators/{path}" for path in saved if path not in generators]
        pairs = {path: (item, saved[path]) for path, item in generators.items() if path in saved}
        loading.wrong += _unfit(name, given, pairs)
        loading.commits.append(lambda: _set(given, list(pairs.values())))

    return Part(read, load)


def _generators(owned: Owned, registered: Mapping[str, object]) -> dict[str, torch.Generator]:
    """By path those in attributes, and in lists, tuples and dicts there."""
    found = _found_in({"": owned.owner, **owned.named_modules()})
    for name, item in registered.items():
        found |= generators_of(f"state.{name}", item)
    return found


def generators_of(name: str, item: object) -> dict[str, torch.Generator]:
    """By path those of a registered object, and of what its attributes hold: a data loader has one, and its sampler."""
    return _found_in(
        {name: item} | {f"{name}.{key}": value for key, value in _attributes(item) if key[:1] != "_"}
    )


def _found_in(places: Mapping[str, object]) -> dict[str, torch.Generator]:
    found = {}
    for owner_path, owner in places.items():
        for name, value in _attributes(owner):
            for path, item in _within(f"{owner_path}.{name}".lstrip("."), value):
                if isinstance(item, torch.Generator):
                    found[path] = item
    return found


def _attributes(owner: object) -> list[tuple[str, Any]]:
    if isinstance(owner, (type, ModuleType, torch.Tensor)):
        return []
    return list(getattr(owner, "__dict__", {}).items())


def _within(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, (list, tuple)):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())


_Pair = tuple[torch.Generator, torch.Tensor]


def _unfit(name: str, given: Mapping[str, Any], pairs: Mapping[str, _Pair]) -> Iterator[str]:
    """The states that generators of their own do not take."""
    takers: dict[str, tuple[Callable[[Any], object], Any]] = {
        f"generators/{path}": (torch.Generator(item.device).set_state, state)
        for path, (item, state) in pairs.items()
    }
    if "cpu" in given:
        takers["cpu"] = (torch.Generator().set_state, given["cpu"])
    if "cuda" in given:
        takers["cuda"] = (torch.cat, given["cuda"])  # a list of tensors
    if "python" in given:
        takers["python"] = (random.Random().setstate, given["python"])
    if "numpy" in given and "numpy" in sys.modules:
        takers["numpy"] = (sys.modules["numpy"].random.RandomState().set_state, given["numpy"])
    for key, (take, state) in takers.items():
        try:
            take(state)
        except Exception as error:
            yield f"{name}/{key}: {error or type(error).__name__}"


def _set(given: Mapping[str, Any], pairs: Sequence[_Pair]) -> None:
    set_random_state(given)
    restore_generators([item for item, _ in pairs], [state for _, state in pairs])
