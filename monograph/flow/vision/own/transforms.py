"""The transforms of image classification, on tensors, numpy arrays and images of Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monograph.flow.vision.own import images
from monograph.flow.vision.own.images import Image, InterpolationMode
from monograph.flow.vision.own.sizes import Borders, Numbers, borders_of, both, resized

__all__ = [
    "CenterCrop",
    "Compose",
    "InterpolationMode",
    "Lambda",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "Resize",
    "ToPILImage",
    "ToTensor",
]

PILLOW_DTYPES = {"I": np.int32, "I;16": np.int16, "F": np.float32}  # of modes that are not bytes


class Compose:
    """Some transforms, one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, img: Any) -> Any:
        for transform in self.transforms:
            img = transform(img)
        return img

    def __repr__(self) -> str:
        lines = "".join(f"\n    {transform}" for transform in self.transforms)
        return f"Compose({lines}\n)"


class Lambda:
    """A function as a transform."""

    def __init__(self, lambd: Callable[[Any], Any]) -> None:
        if not callable(lambd):
            raise TypeError(f"Lambda takes a function, not a {type(lambd).__name__}")
        self.lambd = lambd

    def __call__(self, img: Any) -> Any:
        return self.lambd(img)

    def __repr__(self) -> str:
        return "Lambda()"


class ToTensor:
    """An array [H, W, C] or an image of Pillow as a tensor [C, H, W]; bytes become numbers from 0 to 1."""

    def __call__(self, pic: Image) -> Tensor:
        if images.is_pillow(pic):
            array = np.array(pic, PILLOW_DTYPES.get(pic.mode, np.uint8))
            array = array * np.uint8(255) if pic.mode == "1" else array
        elif isinstance(pic, np.ndarray):
            array = pic
        else:
            raise TypeError(f"ToTensor takes an array or an image of Pillow, not a {type(pic).__name__}")
        tensor = images.planes(array).contiguous()
        return tensor.to(torch.get_default_dtype()).div(255) if tensor.dtype == torch.uint8 else tensor

    def __repr__(self) -> str:
        return "ToTensor()"


class ToPILImage:
    """A tensor [C, H, W] or an array [H, W, C] as an image of Pillow; floating numbers from 0 to 1 become bytes."""

    def __init__(self, mode: str | None = None) -> None:
        self.mode = mode

    def __call__(self, pic: Tensor | np.ndarray[Any, Any]) -> Image:
        if images.pillow is None:
            raise ModuleNotFoundError("ToPILImage needs Pillow: pip install pillow", name="PIL")
        if isinstance(pic, Tensor):
            array = pic.numpy(force=True)
            array = array.transpose(1, 2, 0) if array.ndim == 3 else array
        else:
            array = pic
        if np.issubdtype(array.dtype, np.floating) and self.mode != "F":
            array = (array * 255).astype(np.uint8)
        array = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
        image = images.pillow.fromarray(array)
        return image if self.mode in (None, image.mode) else image.convert(self.mode)

    def __repr__(self) -> str:
        return f"ToPILImage({'' if self.mode is None else f'mode={self.mode}'})"


class Normalize(nn.Module):
    """Each channel of a floating tensor [..., C, H, W], less its mean and divided by its deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        super().__init__()
        self.mean, self.std, self.inplace = mean, std, inplace

    def forward(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"Normalize takes a floating tensor, not {kind}: put ToTensor() before it")
        if tensor.ndim < 3:
            raise ValueError(f"Normalize takes a tensor [..., C, H, W], not {list(tensor.shape)}")
        mean, std = (_channels(numbers, tensor) for numbers in (self.mean, self.std))
        if (std == 0).any():
            raise ValueError(f"Normalize divides by std, which is 0 as {tensor.dtype}")
        return (tensor if self.inplace else tensor.clone()).sub_(mean).div_(std)

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"


class Resize(nn.Module):
    """The image in the size (h, w), or with its smaller edge `size` long and its larger at most `max_size`."""

    def __init__(
        self,
        size: Numbers,
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
        max_size: int | None = None,
        antialias: bool | None = True,
    ) -> None:
        super().__init__()
        if not isinstance(size, int) and len(size) not in (1, 2):
            raise ValueError(f"Resize takes one number or (h, w), not {size}")
        if max_size is not None and not isinstance(size, int) and len(size) == 2:
            raise ValueError("Resize takes max_size with one number only, the size of the smaller edge")
        self.size, self.max_size = size, max_size
        self.interpolation, self.antialias = interpolation, antialias

    def forward(self, img: Image) -> Image:
        size = resized(images.size_of(img), self.size, self.max_size)
        return images.resize(img, size, self.interpolation, antialias=bool(self.antialias))

    def extra_repr(self) -> str:
        rest = f"max_size={self.max_size}, antialias={self.antialias}"
        return f"size={self.size}, interpolation={self.interpolation.value}, {rest}"


class CenterCrop(nn.Module):
    """The middle of the image; an image that is smaller gets a border of zeros."""

    def __init__(self, size: Numbers) -> None:
        super().__init__()
        self.size = both(size)

    def forward(self, img: Image) -> Image:
        wanted = self.size
        height, width = images.size_of(img)
        more_high, more_wide = max(wanted.height - height, 0), max(wanted.width - width, 0)
        if more_high or more_wide:
            borders = Borders(
                more_wide // 2, more_high // 2, more_wide - more_wide // 2, more_high - more_high // 2
            )
            img = images.pad(img, borders)
            height, width = images.size_of(img)
        top, left = round((height - wanted.height) / 2), round((width - wanted.width) / 2)
        return images.crop(img, top, left, wanted)

    def extra_repr(self) -> str:
        return f"size={tuple(self.size)}"


class RandomCrop(nn.Module):
    """A part of the image, after the borders of `padding` (all; left-right, top-bottom; or left, top, right, bottom)."""

    def __init__(
        self,
        size: Numbers,
        padding: Numbers | None = None,
        pad_if_needed: bool = False,
        fill: float | tuple[int, ...] = 0,
        padding_mode: str = "constant",
    ) -> None:
        super().__init__()
        self.size, self.padding, self.pad_if_needed = both(size), padding, pad_if_needed
        self.fill, self.padding_mode = fill, padding_mode

    def forward(self, img: Image) -> Image:
        if self.padding is not None:
            img = images.pad(img, borders_of(self.padding), self.fill, self.padding_mode)
        height, width = images.size_of(img)
        more_high, more_wide = max(self.size.height - height, 0), max(self.size.width - width, 0)
        if self.pad_if_needed and (more_high or more_wide):
            borders = Borders(more_wide, more_high, more_wide, more_high)
            img = images.pad(img, borders, self.fill, self.padding_mode)
            height, width = images.size_of(img)
        if height < self.size.height or width < self.size.width:
            raise ValueError(
                f"RandomCrop cannot cut {tuple(self.size)} out of an image of {(height, width)}: "
                "give it padding or pad_if_needed=True"
            )
        if self.size == (height, width):
            return img
        top = int(torch.randint(0, height - self.size.height + 1, (1,)))
        left = int(torch.randint(0, width - self.size.width + 1, (1,)))
        return images.crop(img, top, left, self.size)

    def extra_repr(self) -> str:
        return f"size={tuple(self.size)}, padding={self.padding}"


class _RandomFlip(nn.Module):
    upside_down: bool

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, img: Image) -> Image:
        return images.mirror(img, upside_down=self.upside_down) if torch.rand(1) < self.p else img

    def extra_repr(self) -> str:
        return f"p={self.p}"


class RandomHorizontalFlip(_RandomFlip):
    """The image with left and right exchanged, with the probability `p`."""

    upside_down = False


class RandomVerticalFlip(_RandomFlip):
    """The image with top and bottom exchanged, with the probability `p`."""

    upside_down = True


def _channels(numbers: Sequence[float], like: Tensor) -> Tensor:
    values = torch.as_tensor(numbers, dtype=like.dtype, device=like.device)
    return values.view(-1, 1, 1) if values.ndim == 1 else values
