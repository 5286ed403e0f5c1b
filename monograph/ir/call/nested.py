"""Walks over nested containers. Those that are rebuilt, or known by their form, are `tree.flatten`'s."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_USUAL = (list, tuple, dict)


def leaves_in(item: Any, containers: tuple[type, ...] = _USUAL, depth: float = math.inf) -> Iterator[Any]:
    """What is in nested containers of these kinds, in order; those that are nested deeper than `depth` are leaves."""
    if isinstance(item, containers) and depth > 0:
        entries: Any = item.values() if isinstance(item, Mapping) else item
        for entry in entries:
            yield from leaves_in(entry, containers, depth - 1)
    else:
        yield item


def tensors_in(
    item: Any, containers: tuple[type, ...] = _USUAL, depth: float = math.inf
) -> list[torch.Tensor]:
    """The tensors among them."""
    return [leaf for leaf in leaves_in(item, containers, depth) if isinstance(leaf, torch.Tensor)]


def leaves_by_path(item: Any, path: str, separator: str = "/") -> Iterator[tuple[str, Any]]:
    """The leaves of nested lists, tuples and dicts, each with `path` and the keys that lead to it."""
    if not isinstance(item, _USUAL):
        yield path, item
        return
    for key, entry in item.items() if isinstance(item, dict) else enumerate(item):
        yield from leaves_by_path(entry, f"{path}{separator}{key}", separator)
