"""Modes that do something wrong on purpose, to see that it is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from monograph.testing import Mode


def spoiled(change: Callable[[Any], Any]) -> Mode:
    """A mode whose graph gives the right results, of which `change` makes others."""

    def make(graph: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            returned = graph(*arguments)
            return dataclasses.replace(returned, result=change(returned.result))

        return call

    return Mode("spoiled", make)


def spoiling(after: Callable[[Any, tuple[Any, ...], int], None]) -> Mode:
    """A mode that runs the graph and then `after(graph, arguments, number of the call)`."""

    def make(graph: Any) -> Callable[..., Any]:
        numbers = iter(range(1000))

        def call(*arguments: Any) -> Any:
            returned = graph(*arguments)
            with torch.no_grad():
                after(graph, arguments, next(numbers))
            return returned

        return call

    return Mode("spoiling", make)
