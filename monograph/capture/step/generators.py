"""Explicit `torch.Generator` objects: those that a step may draw from, and whether build() sets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.step.request import Request
from monograph.compat.global_state import generator_key
from monograph.errors import CaptureError
from monograph.state.random import SavedGenerators


class KnownGenerators:
    """The generators that were there before a trace, and their states.

    They are found among the arguments, in attributes of the graph and its modules, and among the globals and
    closures of build() and of each forward. One that is found nowhere is made in build(), anew at each eager step.
    """

    def __init__(self, request: Request, modules: Mapping[str, nn.Module]) -> None:
        self._known = {
            generator_key(item): item
            for item in _reachable(request, modules)
            if isinstance(item, torch.Generator)
        }
        self._saved = SavedGenerators(self._known.values())

    def restore(self) -> bool:
        """Set back those that have moved; true if any had."""
        return self._saved.restore()

    def check(self, used: Iterable[torch.Generator]) -> None:
        """Raise CaptureError if the step draws from a generator that was not there before."""
        if any(generator_key(item) not in self._known for item in used):
            raise CaptureError(
                "build() makes a random generator of its own, or takes one that only a nested object has",
                hint="make it outside and hold it in an attribute of the graph, or pass it as an argument",
            )


def _reachable(request: Request, modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    places: list[Iterable[Any]] = [request.call.leaves, vars(request.owned.owner).values()]
    functions = {inspect.unwrap(request.build), *(type(module).forward for module in modules.values())}
    functions |= {value for value in vars(type(request.owned.owner)).values() if inspect.isfunction(value)}
    for module in modules.values():
        places.append(vars(module).values())
    seen: set[int] = set()
    places += [_surroundings(function, seen) for function in functions]
    for place in places:
        for item in place:
            yield item
            if isinstance(item, (list, tuple)):
                yield from item
            elif isinstance(item, dict):
                yield from list(item.values())


def _surroundings(function: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    function = getattr(function, "__func__", function)
    if id(function) in seen:
        return
    seen.add(id(function))
    yield from list(getattr(function, "__globals__", {}).values())
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    for value in closure_of(function).values():
        yield value
        if inspect.isfunction(value):
            yield from _surroundings(value, seen)
