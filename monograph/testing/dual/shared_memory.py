"""Arguments that share memory with what a call changes, as a graph can take them: as views made inside of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from monograph.compat.tensors import storage_key
from monograph.testing.alignment.arguments import Arguments


class _View:
    """A tensor as a part of its memory. Not a dataclass, which would count as something nested."""

    def __init__(self, tensor: torch.Tensor, base: int) -> None:
        self._base = base
        self._size, self._stride = tuple(tensor.shape), tensor.stride()
        self._offset = int(tensor.storage_offset())

    def of(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The view of its piece of memory."""
        # without an offset of its own, as_strided begins where the piece does, wherever that is in memory
        piece = pieces[self._base]
        return (piece[self._offset :] if self._offset else piece).as_strided(self._size, self._stride)


def with_views_inside(
    target: Callable[..., Any], given: Arguments
) -> tuple[Callable[..., Any], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A function of the pieces of memory that several arguments share, and of the other tensors; and these tensors.

    A graph refuses arguments that share memory if it changes one of them; of the call itself that says nothing.
    """
    tensors = given.tensors()
    counts = Counter(map(storage_key, tensors))
    keys = [key for key, count in counts.items() if count > 1]
    bases = [_whole(next(t for t in tensors if storage_key(t) == key)) for key in keys]
    for base, key in zip(bases, keys, strict=True):
        base.requires_grad_(any(t.requires_grad for t in tensors if storage_key(t) == key))
    others = [t for t in tensors if counts[storage_key(t)] == 1]
    form = given.mapped(lambda leaf: _view(leaf, keys) if isinstance(leaf, torch.Tensor) else leaf)

    def call(pieces: list[torch.Tensor], rest: list[torch.Tensor]) -> Any:
        left = iter(rest)

        def placed(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return leaf.of(pieces)
            return next(left) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = form.mapped(placed)
        (result,), _ = Arguments((target(*args, **kwargs),), {}).mapped(_cloned)
        return result

    call.__name__ = getattr(target, "__name__", "call")
    return call, (bases, others)


def share_memory(given: Arguments) -> bool:
    """True if two arguments share one piece of memory, which both see as numbers of one dtype."""
    tensors = [tensor for tensor in given.tensors() if tensor.layout is torch.strided and tensor.numel()]
    dtypes: dict[int, set[torch.dtype]] = {}
    for tensor in tensors:
        dtypes.setdefault(storage_key(tensor), set()).add(tensor.dtype)
    return len(dtypes) < len(tensors) and all(len(kinds) == 1 for kinds in dtypes.values())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory of a tensor."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _cloned(leaf: Any) -> Any:
    """The value alone: that a result shares the memory of an argument is nothing that a graph promises here."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _view(tensor: torch.Tensor, keys: list[int]) -> Any:
    key = storage_key(tensor)
    return _View(tensor, keys.index(key)) if key in keys else tensor
