"""Strategies for tensors: shapes, dtypes, layouts, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from hypothesis import strategies as st

from monograph.testing.strategies.spec import TensorSpec, build
from monograph.testing.strategies.values import VALUES, Values

Shape = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Layout = Literal["contiguous", "permuted", "gapped", "expanded", "offset", "mixed"]

LAYOUTS: Final[tuple[Layout, ...]] = ("contiguous", "permuted", "gapped", "expanded", "offset", "mixed")
FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX: Final = (torch.complex64, torch.complex128)
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES: Final = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)

SEEDS: Final = st.integers(0, 2**16 - 1)


def shapes(
    *, min_dims: int = 0, max_dims: int = 4, min_side: int = 0, max_side: int = 5
) -> st.SearchStrategy[Shape]:
    """Shapes, 0-dim and empty ones among them; they shrink to fewer and shorter dimensions."""
    side = st.integers(min_side, max_side)
    return st.lists(side, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def tensor_specs(
    draw: Draw,
    shape: Shape | st.SearchStrategy[Shape] | None = None,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    layouts: Sequence[Layout] = LAYOUTS,
    values: Sequence[Values] = VALUES,
    low: float | None = None,
    high: float | None = None,
    requires_grad: bool | None = None,
) -> TensorSpec:
    """What a tensor is made from. `requires_grad=None` draws it, for dtypes that can have gradients."""
    size = draw(shapes()) if shape is None else shape if isinstance(shape, tuple) else draw(shape)
    dtype = draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(layouts))
    laid_out = _layout(draw, layout, size)
    wanted = draw(st.booleans()) if requires_grad is None else requires_grad
    return TensorSpec(
        size,
        dtype,
        values=draw(st.sampled_from(values)),
        low=low,
        high=high,
        requires_grad=wanted and (dtype.is_floating_point or dtype.is_complex),
        seed=draw(SEEDS),
        **laid_out,
    )


def tensors(
    shape: Shape | st.SearchStrategy[Shape] | None = None,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    layouts: Sequence[Layout] = LAYOUTS,
    values: Sequence[Values] = VALUES,
    low: float | None = None,
    high: float | None = None,
    requires_grad: bool | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of any shape, layout and content. A falsifying one is printed as the code that makes it.

    Contents come from one drawn seed, so shrinking works on shape, dtype and layout first.
    """
    return tensor_specs(
        shape,
        dtypes=dtypes,
        layouts=layouts,
        values=values,
        low=low,
        high=high,
        requires_grad=requires_grad,
    ).map(build)


def _layout(draw: Draw, layout: Layout, size: Shape) -> dict[str, Any]:
    """The fields of a TensorSpec that say how the tensor is laid out in memory."""
    dims = range(len(size))
    found: dict[str, Any] = {}
    if layout in ("permuted", "mixed"):
        found["order"] = tuple(draw(st.permutations(dims)))
    if layout in ("gapped", "mixed"):
        found["steps"] = tuple(draw(st.integers(1, 3)) for _ in dims)
    if layout in ("expanded", "mixed"):
        found["expanded"] = tuple(dim for dim in dims if draw(st.booleans()))
    if layout in ("offset", "mixed"):
        found["offset"] = draw(st.integers(1, 4))
    return found
