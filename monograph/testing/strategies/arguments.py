"""Strategies for arguments that fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from monograph.testing.strategies.tensors import INTEGERS, Draw, Shape, shapes, tensors


def same_shape(
    count: int = 2, *, shape: st.SearchStrategy[Shape] | None = None, **options: Any
) -> st.SearchStrategy[tuple[torch.Tensor, ...]]:
    """Tensors of one shape and one dtype; `options` are those of `tensors`."""

    @st.composite
    def draw_them(draw: Draw) -> tuple[torch.Tensor, ...]:
        size = draw(shapes() if shape is None else shape)
        one = _one_dtype(draw, options)
        return tuple(draw(tensors(size, **one)) for _ in range(count))

    return draw_them()


def broadcastable(
    count: int = 2, *, shape: st.SearchStrategy[Shape] | None = None, **options: Any
) -> st.SearchStrategy[tuple[torch.Tensor, ...]]:
    """Tensors of one dtype whose shapes broadcast to one."""

    @st.composite
    def draw_them(draw: Draw) -> tuple[torch.Tensor, ...]:
        size = draw(shapes() if shape is None else shape)
        one = _one_dtype(draw, options)
        return tuple(draw(tensors(_narrowed(draw, size), **one)) for _ in range(count))

    return draw_them()


@st.composite
def matmul_pairs(draw: Draw, /, *, max_side: int = 5, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that `torch.matmul` takes: vectors, matrices, batches that broadcast."""
    side = st.integers(0, max_side)
    rows, inner, columns = draw(side), draw(side), draw(side)
    left, right = draw(st.sampled_from([(2, 2), (1, 1), (1, 2), (2, 1), (3, 3)]))
    one = _one_dtype(draw, options)
    batch = draw(shapes(min_dims=1, max_dims=2, max_side=3)) if left == 3 else ()
    a = (inner,) if left == 1 else (*batch, rows, inner)
    b = (inner,) if right == 1 else (*_narrowed(draw, batch), inner, columns)
    if left == 3 and draw(st.booleans()):
        a, b = (*b[:-2], rows, inner), (*batch, inner, columns)
    return draw(tensors(a, **one)), draw(tensors(b, **one))


@st.composite
def tensor_and_dim(draw: Draw, /, **options: Any) -> tuple[torch.Tensor, int]:
    """A tensor and one of its dimensions, counted from the front or from the back."""
    size = draw(shapes(min_dims=1))
    return draw(tensors(size, **options)), draw(st.integers(-len(size), len(size) - 1))


@st.composite
def tensor_and_index(
    draw: Draw, /, *, dtypes: Sequence[torch.dtype] = (torch.int64, torch.int32), **options: Any
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A tensor, a dimension and a 1-dim tensor of positions in it, as `torch.index_select` takes them."""
    size = draw(shapes(min_dims=1, min_side=1))
    dim = draw(st.integers(-len(size), len(size) - 1))
    count = draw(st.integers(0, 5))
    index = _positions((count,), size[dim], dtypes)
    return draw(tensors(size, **options)), dim, draw(index)


@st.composite
def gather_arguments(draw: Draw, /, **options: Any) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A tensor, a dimension and an index tensor with as many dimensions, as `torch.gather` takes them."""
    size = draw(shapes(min_dims=1, min_side=1))
    dim = draw(st.integers(0, len(size) - 1))
    taken = tuple(draw(st.integers(0, 5 if d == dim else side)) for d, side in enumerate(size))
    return draw(tensors(size, **options)), dim, draw(_positions(taken, size[dim], (torch.int64,)))


def _positions(shape: Shape, count: int, dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[torch.Tensor]:
    assert all(dtype in INTEGERS for dtype in dtypes)
    return tensors(shape, dtypes=dtypes, values=("whole",), low=0, high=count)


def _one_dtype(draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    """The options with one dtype drawn for all."""
    if "dtypes" not in options:
        return {**options, "dtypes": (torch.float32,)}
    return {**options, "dtypes": (draw(st.sampled_from(options["dtypes"])),)}


def _narrowed(draw: Draw, size: Shape) -> Shape:
    """A shape that broadcasts to `size`: leading dimensions dropped, some sides 1."""
    kept = size[draw(st.integers(0, len(size))) :]
    return tuple(1 if draw(st.booleans()) else side for side in kept)
