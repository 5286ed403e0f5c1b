"""A program bound to what has taken the place of the tensors and containers that it was bound to."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import is_
from typing import Any

from monograph.ir.graph_signature import Bindable, BoundProgram
from monograph.state.swap import Swap


def bound_anew(bound: BoundProgram, swap: Swap) -> BoundProgram:
    """The same program, bound to the new objects."""
    return replace(
        bound,
        sources=_anew(bound.sources, swap),
        targets=_anew(bound.targets, swap),
        writes=_anew(bound.writes, swap),
        results=_anew(bound.results, swap),
        changes=_anew(bound.changes, swap),
    )


def _anew(item: Any, swap: Swap) -> Any:
    if type(item) is tuple:
        made = tuple(_anew(entry, swap) for entry in item)
        return item if all(map(is_, made, item)) else made
    if not isinstance(item, Bindable):
        return swap.of(item)
    found = {entry.name: getattr(item, entry.name) for entry in fields(item)}
    changed = {name: new for name, old in found.items() if (new := _anew(old, swap)) is not old}
    return replace(item, **changed) if changed else item
