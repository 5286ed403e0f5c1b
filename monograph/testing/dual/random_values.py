"""A random value of a type that an annotation names."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from hypothesis import strategies as st

Bounds = tuple[Any, Any]

_UNIONS: Final = (typing.Union, types.UnionType)
_SEQUENCES: Final = (tuple, list, Sequence)
_LONGEST = 3  # of a tuple whose length the annotation leaves open


def strategy_for(annotation: Any, bounds: Bounds) -> st.SearchStrategy[Any]:
    """Values of the annotated type; numbers are in [low, high). Raises TypeError for types that cannot be drawn."""
    if annotation in _PLAIN:
        return _PLAIN[annotation](*bounds)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS:
        return st.one_of([strategy_for(kind, bounds) for kind in inner if can_draw(kind)])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is typing.Annotated:
        return strategy_for(inner[0], bounds)
    if annotation in _SEQUENCES:
        return _some(int, bounds)
    if origin in _SEQUENCES:
        if origin is tuple and Ellipsis not in inner:
            return st.tuples(*(strategy_for(kind, bounds) for kind in inner))
        return _some(inner[0], bounds)
    raise TypeError(
        f"random() cannot draw a value of type {annotation!r}; give one with .to(int), .to(float), ..."
    )


def can_draw(annotation: Any) -> bool:
    """True if `strategy_for` knows the type."""
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in _UNIONS:
        return any(map(can_draw, inner))
    if origin in _SEQUENCES:
        return all(kind is Ellipsis or can_draw(kind) for kind in inner)
    return annotation in _PLAIN or annotation in _SEQUENCES or origin in (typing.Literal, typing.Annotated)


def _some(kind: Any, bounds: Bounds) -> st.SearchStrategy[Any]:
    return st.lists(strategy_for(kind, bounds), min_size=1, max_size=_LONGEST).map(tuple)


def _whole(low: Any, high: Any) -> st.SearchStrategy[int]:
    low, high = int(low), int(high)
    if high <= low:
        raise ValueError(f"random({low}, {high}) has no whole numbers: `high` itself does not occur")
    return st.integers(low, high - 1)


def _real(low: Any, high: Any) -> st.SearchStrategy[float]:
    low, high = float(low), float(high)
    return st.floats(low, high, exclude_max=low < high, allow_nan=False, allow_subnormal=False)


def _complex(low: Any, high: Any) -> st.SearchStrategy[complex]:
    return st.builds(complex, _real(low, high), _real(low, high))


_PLAIN: Final[Mapping[Any, Callable[[Any, Any], st.SearchStrategy[Any]]]] = MappingProxyType(
    {
        int: _whole,
        float: _real,
        complex: _complex,
        bool: lambda low, high: st.booleans(),
        type(None): lambda low, high: st.none(),
        None: lambda low, high: st.none(),
        torch.dtype: lambda low, high: st.sampled_from([torch.float32, torch.float64]),
    }
)
