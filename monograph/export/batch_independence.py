"""Tests of batch independence: does a row of a result depend on other rows? They can refute it, and never prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors], Tensors]

_SCALES: Final = (1.0, 10.0)  # of random floats
_BOUNDS: Final = (1000, 10, 2)  # of random integers: the largest that the model takes
_MOST_ROWS: Final = 4  # each is looked at by itself


def trials(
    run: Run, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> Iterator[list[torch.Tensor]]:
    """Batches of random numbers that a model takes. Raises what the model raises if it takes none."""
    source = torch.Generator().manual_seed(0)

    def batch(scale: float, bound: int) -> list[torch.Tensor]:
        return [
            _random(shape, dtype, scale, bound, source) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    bound = next((item for item in _BOUNDS[:-1] if _takes(run, batch(1.0, item))), _BOUNDS[-1])
    for scale in _SCALES:
        yield batch(scale, bound)


def rows_are_apart(run: Run, batch: Tensors) -> bool:
    """Whether each row gives the same among other rows as among copies of itself, wherever it is."""
    results = run(batch)
    for index in range(min(len(batch[0]), _MOST_ROWS)):
        copies = [item[index : index + 1].repeat(len(item), *[1] * (item.dim() - 1)) for item in batch]
        for among_others, alone in zip(results, run(copies), strict=True):
            row = among_others[index : index + 1].expand(alone.shape)
            if not torch.allclose(row.double(), alone.double(), rtol=1e-3, atol=1e-5, equal_nan=True):
                return False
    return True


def _takes(run: Run, batch: Tensors) -> bool:
    try:
        run(batch)
    except Exception:  # an index that is out of range is an error of many kinds
        return False
    return True


def _random(
    shape: Sequence[int], dtype: torch.dtype, scale: float, bound: int, source: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=source) * scale).to(dtype)
    high = 2 if dtype is torch.bool else min(bound, torch.iinfo(dtype).max)
    return torch.randint(high, tuple(shape), generator=source).to(dtype)
