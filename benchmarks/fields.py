"""Dataclasses from what JSON left of them: of files, and of what workers are asked and answer."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def from_fields(kind: type[Record], fields: dict[str, Any]) -> Record:
    """A dataclass from the fields that `asdict` gave."""
    kinds = get_type_hints(kind)
    return kind(**{name: _value(kinds[name], item) for name, item in fields.items()})


def _value(kind: Any, item: Any) -> Any:
    if is_dataclass(kind):
        return from_fields(kind, item)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        (item_kind, _) = get_args(kind)  # of any length
        return tuple(_value(item_kind, each) for each in item)
    if get_origin(kind) is UnionType and item is not None:
        (item_kind, _) = get_args(kind)  # or none
        return _value(item_kind, item)
    return item
