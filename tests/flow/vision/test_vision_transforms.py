"""Our own transforms do what torchvision's do, bit by bit, to tensors, arrays and images of Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tests.support.torchvision_ops  # noqa: F401
from monograph.flow.vision.own import transforms as ours
from tests.support import assert_same

theirs = pytest.importorskip("torchvision").transforms
pillow = pytest.importorskip("PIL.Image")

GRAY, RGB = (29, 40), (29, 40, 3)
BYTES = {shape: np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8) for shape in (GRAY, RGB)}
PICTURES = {
    "float tensor": torch.from_numpy(BYTES[RGB]).permute(2, 0, 1) / 255,
    "byte tensor": torch.from_numpy(BYTES[RGB]).permute(2, 0, 1),
    "batch of doubles": torch.rand(2, 1, 29, 40, dtype=torch.float64),
    "RGB": pillow.fromarray(BYTES[RGB]),
    "L": pillow.fromarray(BYTES[GRAY]),
    "F": pillow.fromarray(BYTES[GRAY].astype(np.float32)),
    "RGBA": pillow.fromarray(BYTES[RGB]).convert("RGBA"),
}
TRANSFORMS = {
    "CenterCrop": [{"size": 20}, {"size": [21]}, {"size": (12, 17)}, {"size": (40, 30)}, {"size": (33, 51)}],
    "RandomCrop": [
        {"size": 20},
        {"size": (29, 40)},
        {"size": (28, 31), "padding": 4},
        {"size": 25, "padding": (3, 1)},
        {"size": 25, "padding": [1, 2, 3, 4], "fill": 7},
        {"size": (50, 45), "pad_if_needed": True},
        {"size": 32, "padding": 4, "padding_mode": "reflect"},
        {"size": 32, "padding": 4, "padding_mode": "edge"},
        {"size": 32, "padding": 4, "padding_mode": "symmetric"},
    ],
    "RandomHorizontalFlip": [{}, {"p": 1.0}],
    "RandomVerticalFlip": [{}, {"p": 0.9}],
    "Resize": [
        {"size": 16},
        {"size": [35]},
        {"size": (29, 40)},
        {"size": (13, 64)},
        {"size": 20, "max_size": 24},
        {"size": 50, "interpolation": "BICUBIC"},
        {"size": 20, "interpolation": "BICUBIC"},
        {"size": 20, "interpolation": "NEAREST"},
        {"size": 20, "antialias": None},
    ],
}
CASES = [
    pytest.param(name, options, id=f"{name} {options}")
    for name, rows in TRANSFORMS.items()
    for options in rows
]


def made(library: Any, name: str, options: dict[str, Any]) -> Any:
    given = dict(options)
    if "interpolation" in given:
        given["interpolation"] = library.InterpolationMode[given["interpolation"]]
    return getattr(library, name)(**given)


def content(image: Any) -> Any:
    """An image as something that can be compared."""
    if isinstance(image, torch.Tensor):
        return image
    return getattr(image, "mode", "array"), torch.from_numpy(np.array(image))


def seeded(transform: Any, image: Any) -> list[Any]:
    torch.manual_seed(11)
    return [content(transform(image)) for _ in range(3)]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_transform_is_that_of_torchvision(name: str, options: dict[str, Any]) -> None:
    expected, own = made(theirs, name, options), made(ours, name, options)
    assert repr(own) == repr(expected)
    for kind, image in PICTURES.items():
        assert_same(seeded(expected, image), seeded(own, image), kind)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_array_is_treated_as_the_tensor_of_it(name: str, options: dict[str, Any]) -> None:
    transform = made(ours, name, options)
    expected = seeded(transform, PICTURES["byte tensor"])
    arrays = [torch.from_numpy(array) for array in arrays_of(transform, BYTES[RGB])]
    assert_same([tensor.permute(1, 2, 0) for tensor in expected], arrays)
    gray = arrays_of(transform, BYTES[GRAY])
    one = arrays_of(transform, BYTES[GRAY][:, :, None])
    assert all(np.array_equal(a, b[:, :, 0]) for a, b in zip(gray, one, strict=True))


def arrays_of(transform: Any, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    torch.manual_seed(11)
    return [transform(array) for _ in range(3)]


def test_to_tensor_is_that_of_torchvision() -> None:
    arrays = [BYTES[RGB], BYTES[GRAY], BYTES[RGB][::2, ::-1].copy(), BYTES[RGB].astype(np.float32)]
    images = [image for image in PICTURES.values() if not isinstance(image, torch.Tensor)]
    images += [PICTURES["L"].convert("I"), PICTURES["L"].convert("1"), PICTURES["RGB"].convert("P")]
    for image in (*arrays, *images):
        assert_same(theirs.ToTensor()(image), ours.ToTensor()(image))
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(theirs.ToTensor()(BYTES[RGB]), ours.ToTensor()(BYTES[RGB]))
    finally:
        torch.set_default_dtype(torch.float32)


def test_images_of_pillow_are_those_of_torchvision() -> None:
    tensor = PICTURES["float tensor"]
    for pic in (tensor, tensor[:1], tensor[0], PICTURES["byte tensor"], BYTES[RGB], BYTES[GRAY].astype("i4")):
        assert_same(content(theirs.ToPILImage()(pic)), content(ours.ToPILImage()(pic)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_normalize_is_that_of_torchvision(dtype: torch.dtype) -> None:
    options = {"mean": (0.485, 0.456, 0.406), "std": [0.229, 0.224, 0.225]}
    expected, own = theirs.Normalize(**options), ours.Normalize(**options)
    assert repr(own) == repr(expected)
    image = PICTURES["float tensor"].to(dtype)
    for x in (image, image[None]):
        assert_same(expected(x), own(x))
    changed = image.clone()
    assert ours.Normalize(**options, inplace=True)(changed) is changed
    assert_same(own(image), changed)


def test_composed_transforms_are_those_of_torchvision() -> None:
    def chain(library: Any) -> Any:
        return library.Compose(
            [
                library.RandomCrop(24, padding=2),
                library.RandomHorizontalFlip(),
                library.ToTensor(),
                library.Lambda(lambda x: x.mul(2)),
                library.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
            ]
        )

    assert repr(chain(ours)) == repr(chain(theirs))
    assert_same(seeded(chain(theirs), PICTURES["RGB"]), seeded(chain(ours), PICTURES["RGB"]))
    # without Pillow a data set gives arrays
    assert_same(seeded(chain(theirs), PICTURES["RGB"]), seeded(chain(ours), BYTES[RGB]))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "options", "image"),
    [
        ("RandomCrop", {"size": 64}, "RGB"),
        ("Normalize", {"mean": [0.0], "std": [0.0]}, "float tensor"),
        ("Normalize", {"mean": [0.0], "std": [1.0]}, "byte tensor"),
        ("ToTensor", {}, "float tensor"),
        ("Resize", {"size": 20, "max_size": 20}, "RGB"),
        ("Resize", {"size": (1, 2, 3)}, "RGB"),
        ("CenterCrop", {"size": (1, 2, 3)}, "RGB"),
        ("RandomCrop", {"size": 8, "padding": (1, 2, 3)}, "RGB"),
        ("RandomCrop", {"size": 8, "padding": 1, "padding_mode": "mean"}, "RGB"),
    ],
)
def test_what_torchvision_refuses_is_refused(name: str, options: dict[str, Any], image: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        made(theirs, name, options)(PICTURES[image])
    with pytest.raises(refused.type, match=r"\w+ \w+"):
        made(ours, name, options)(PICTURES[image])


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_gradients_pass_through(mode: str) -> None:
    gradients = []
    for library in (theirs, ours):
        x = PICTURES["float tensor"].clone().requires_grad_()
        torch.manual_seed(4)
        chain = library.Compose(
            [library.RandomCrop(30, padding=4, padding_mode=mode), library.RandomHorizontalFlip(p=1.0)]
        )
        chain(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
