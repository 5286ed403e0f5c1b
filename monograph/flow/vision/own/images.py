"""What the transforms do to an image: a tensor [..., C, H, W], a numpy array [H, W] or [H, W, C], or one of Pillow."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from monograph.flow.vision.own.sizes import Borders, Size

try:
    pillow: Any = import_module("PIL.Image")
    pillow_operations: Any = import_module("PIL.ImageOps")
except ImportError:
    pillow = pillow_operations = None

Image = Any  # a tensor, an array, or an image of Pillow where it is installed
Arguments = ParamSpec("Arguments")


class InterpolationMode(Enum):
    """How pixels between pixels are found; tensors know the first four."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
PILLOW_FILTERS = {
    InterpolationMode.NEAREST: "NEAREST",
    InterpolationMode.NEAREST_EXACT: "NEAREST",
    **{mode: mode.name for mode in InterpolationMode if not mode.name.startswith("NEAREST")},
}


def is_pillow(image: Image) -> bool:
    """True for an image of Pillow, where it is installed."""
    return pillow is not None and isinstance(image, pillow.Image)


def pillow_image(array: np.ndarray[Any, Any]) -> Image:
    """An array as an image of Pillow; the array itself where Pillow is not installed."""
    return array if pillow is None else pillow.fromarray(array)


def planes(array: np.ndarray[Any, Any]) -> Tensor:
    """A numpy image as the tensor [C, H, W] that shares its memory. ValueError for other dimensions."""
    if array.ndim not in (2, 3):
        raise ValueError(f"an image has 2 or 3 dimensions, this array has {array.ndim}")
    rows = array if array.ndim == 3 else array[:, :, None]
    return torch.from_numpy(rows.transpose(2, 0, 1))


def also_for_arrays(
    function: Callable[Concatenate[Image, Arguments], Image],
) -> Callable[Concatenate[Image, Arguments], Image]:
    """The function, which gives an array for an array by way of a tensor."""

    @wraps(function)
    def call(image: Image, /, *args: Arguments.args, **options: Arguments.kwargs) -> Image:
        if not isinstance(image, np.ndarray):
            return function(image, *args, **options)
        rows = function(planes(image), *args, **options).numpy().transpose(1, 2, 0)
        return np.ascontiguousarray(rows if image.ndim == 3 else rows[:, :, 0])

    return call


def size_of(image: Image) -> Size:
    """The size of an image. TypeError for what is none."""
    if is_pillow(image):
        return Size(image.height, image.width)
    if isinstance(image, np.ndarray):
        return Size(*planes(image).shape[-2:])
    if isinstance(image, Tensor) and image.ndim >= 2:
        return Size(*image.shape[-2:])
    raise TypeError(f"an image is a tensor, an array or an image of Pillow, not a {type(image).__name__}")


@also_for_arrays
def crop(image: Image, top: int, left: int, size: Size) -> Image:
    """The part of an image that begins at (top, left)."""
    bottom, right = top + size.height, left + size.width
    if is_pillow(image):
        return image.crop((left, top, right, bottom))
    return image[..., top:bottom, left:right]


@also_for_arrays
def mirror(image: Image, *, upside_down: bool) -> Image:
    """The image with its columns, or its rows, in reverse order."""
    if is_pillow(image):
        kind = pillow.Transpose
        return image.transpose(kind.FLIP_TOP_BOTTOM if upside_down else kind.FLIP_LEFT_RIGHT)
    return image.flip(-2 if upside_down else -1)


@also_for_arrays
def pad(image: Image, borders: Borders, fill: float | tuple[int, ...] = 0, mode: str = "constant") -> Image:
    """The image with borders, of the kinds in PADDING_MODES; `fill` may be a colour for an image of Pillow."""
    if mode not in PADDING_MODES:
        raise ValueError(f"there is no padding {mode!r}: choose one of {', '.join(PADDING_MODES)}")
    if is_pillow(image) and mode == "constant":
        bands = len(image.getbands())
        colour = (fill,) * bands if bands > 1 and isinstance(fill, (int, float)) else fill
        return pillow_operations.expand(image, tuple(borders), colour)
    if is_pillow(image):
        return pillow.fromarray(pad(np.array(image), borders, fill, mode))
    left, top, right, bottom = borders
    if mode == "constant":
        return F.pad(image, (left, right, top, bottom), value=cast(float, fill))
    rows = padded_indices(image.shape[-2], top, bottom, mode)
    columns = padded_indices(image.shape[-1], left, right, mode)
    return image[..., rows[:, None], columns]


def padded_indices(length: int, before: int, after: int, mode: str) -> Tensor:
    """Which row or column each one of the padded image is."""
    return torch.from_numpy(np.pad(np.arange(length), (before, after), mode))  # type: ignore[call-overload]


@also_for_arrays
def resize(image: Image, size: Size, mode: InterpolationMode, *, antialias: bool = True) -> Image:
    """The image in another size; one of Pillow is always smoothed when it is made smaller."""
    if size == size_of(image):
        return image
    if is_pillow(image):
        return image.resize((size.width, size.height), pillow.Resampling[PILLOW_FILTERS[mode]])
    smooth = mode in SMOOTH
    batch = image if image.ndim > 3 else image[None]
    pixels = batch if batch.dtype in (torch.float32, torch.float64) else batch.float()
    result = F.interpolate(
        pixels,
        tuple(size),
        mode=mode.value,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    if image.dtype == torch.uint8:
        result = result.clamp(0, 255)
    result = result if image.is_floating_point() else result.round()
    return result.to(image.dtype).reshape(*image.shape[:-2], *size)
