"""Tensors that take the place of others for the time of a step, wherever code holds these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from monograph.compat.modes import FunctionMode


def calls_with(made: Mapping[int, Any]) -> FunctionMode:
    """A context manager: calls that are given a tensor that another one is `made` for, by id of the first, get that one."""
    return FunctionMode(partial(_call, made))


def _call(made: Mapping[int, Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def replaced(item: Any) -> Any:
        return made.get(id(item), item)

    return func(*mapped(args, replaced), **mapped(kwargs, replaced))


def mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """Nested lists, tuples and dicts, with what a function makes of each leaf."""
    kind = type(item)
    if kind is list or kind is tuple:
        return kind([mapped(entry, function) for entry in item])
    if kind is dict:
        return {key: mapped(entry, function) for key, entry in item.items()}
    return function(item)
