"""What duals and generators stand for: the values that torch itself is called with."""

from __future__ import annotations

from typing import Any

from monograph.testing.dual.annotations import UNKNOWN, Types
from monograph.testing.dual.generators import Generator, Nothing


def settled(item: Any, annotation: Any = UNKNOWN) -> Any:
    """The real object of a dual, the value of a generator of this type, and so on through containers."""
    if isinstance(item, Generator):
        generator = item if annotation is UNKNOWN else item.to(annotation)
        return settled(generator.value())
    if isinstance(item, slice):
        return slice(settled(item.start, int), settled(item.stop, int), settled(item.step, int))
    if type(item) in (tuple, list):
        return type(item)(settled(part, annotation) for part in item)
    if type(item) is dict:
        return {key: settled(value, annotation) for key, value in item.items()}
    # not isinstance: this file is below the one that knows the duals
    return item.pytorch if hasattr(type(item), "pytorch") else item


def settled_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], types: Types
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; those that are `nothing()` are left out."""
    values = [settled(arg, types.at(place)) for place, arg in enumerate(args)]
    named = {name: settled(arg, types.at(name)) for name, arg in kwargs.items()}
    given = tuple(value for value in values if not isinstance(value, Nothing))
    return given, {name: value for name, value in named.items() if not isinstance(value, Nothing)}
