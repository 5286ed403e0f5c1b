"""Generators: types from annotations, values that stay, algebra, and the tensors they make."""

# ruff: noqa: F403, F405  names by a star, as tests for AutoTest are written

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any, Literal, Optional, Tuple, Union  # noqa: UP035  the spelling of old tests

import pytest
import torch as real_torch

from monograph.testing.dual import *
from monograph.testing.dual.tensors import DTYPES


def collect(make: Callable[[], Any], n: int = 30) -> list[Any]:
    """What `make` gives in each case."""
    found = []

    @autotest(n=n, check_graph=False, auto_backward=False)
    def test() -> None:
        found.append(make())

    test()
    return found


def test_a_number_lies_in_its_range() -> None:
    assert set(collect(lambda: random().to(int).value())) == {1, 2, 3, 4, 5}
    assert all(-2 <= value < 3 for value in collect(lambda: random(-2, 3).to(float).value()))


def test_a_value_stays_the_same_in_a_case_and_is_new_in_the_next() -> None:
    shared = random(1, 100)

    def twice() -> tuple[int, int]:
        return shared.to(int).value(), shared.value()

    found = collect(twice)
    assert all(a == b for a, b in found)
    assert len(set(found)) > 1


def test_the_first_type_counts() -> None:
    assert all(type(value) is int for value in collect(lambda: random().to(int).to(float).value(), 5))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("annotation", "fits"),
    [
        (int, lambda value: type(value) is int),
        (float, lambda value: type(value) is float),
        (bool, lambda value: type(value) is bool),
        (complex, lambda value: type(value) is complex),
        (None, lambda value: value is None),
        (tuple, lambda value: type(value) is tuple),
        (Tuple[int, float], lambda value: list(map(type, value)) == [int, float]),  # noqa: UP006
        (tuple[int, ...], lambda value: 1 <= len(value) <= 3),
        (Union[int, Tuple[int, int]], lambda value: type(value) is int or len(value) == 2),  # noqa: UP006, UP007
        (Optional[int], lambda value: value is None or type(value) is int),  # noqa: UP045
        (int | None, lambda value: value is None or type(value) is int),
        (Literal["a", "b"], lambda value: value in ("a", "b")),
        (str | int, lambda value: type(value) is int),
        (real_torch.dtype, lambda value: isinstance(value, real_torch.dtype)),
    ],
)
def test_types(annotation: Any, fits: Callable[[Any], bool]) -> None:
    assert all(map(fits, collect(lambda: random().to(annotation).value(), 10)))


def test_every_member_of_a_union_occurs() -> None:
    found = collect(lambda: random().to(Union[int, Tuple[int, int]]).value())  # noqa: UP006, UP007
    assert {type(value) for value in found} == {int, tuple}


def test_a_type_that_cannot_be_drawn_is_named() -> None:
    with pytest.raises(TypeError, match="cannot draw a value of type <class 'str'>"):
        collect(lambda: random().to(str).value())
    with pytest.raises(TypeError, match=r"needs a type here: write random\(1, 6\)\.to\(int\)"):
        collect(lambda: random().value())
    with pytest.raises(ValueError, match=r"random\(3, 3\) has no whole numbers"):
        collect(lambda: random(3, 3).to(int).value())


def test_algebra() -> None:
    def values() -> tuple[Any, ...]:
        a, b = random(1, 9), random(1, 9)
        made = (a + b, a - b, a * b, -a, 2 + a, 2 - a, 2 * a)
        numbers = [generator.to(int).value() for generator in made]
        return a.value(), b.value(), numbers

    for a, b, numbers in collect(values, 10):
        assert numbers == [a + b, a - b, a * b, -a, 2 + a, 2 - a, 2 * a]


def test_one_of_several() -> None:
    assert set(collect(lambda: oneof(1, 2, 3).value())) == {1, 2, 3}
    assert set(collect(lambda: (constant(1) | 2 | 3).value())) == {1, 2, 3}
    assert set(collect(lambda: oneof(1, 2, possibility=1.0).value())) == {1}
    assert set(collect(lambda: oneof(1, 2, possibility=0.0).value())) == {2}
    assert set(collect(lambda: oneof(1, 2, 3, possibility=[0.5, 0.0, 0.5]).value())) == {1, 3}
    with pytest.raises(ValueError, match="3 choices and 2 possibilities"):
        oneof(1, 2, 3, possibility=0.5)


def test_nothing_leaves_the_argument_out() -> None:
    def dims() -> list[str]:
        seen = []
        dual(lambda *args, **kwargs: seen.append((args, kwargs)))(
            1, nothing(), a=nothing(), b=random_or_nothing(1, 3).to(int)
        )
        return seen

    found = [call for seen in collect(dims) for call in seen]
    assert all(args == (1,) and set(kwargs) <= {"b"} for args, kwargs in found)
    assert {len(kwargs) for _, kwargs in found} == {0, 1}


def test_the_annotations_of_a_module_say_the_types() -> None:
    def options() -> Any:
        layer = torch.nn.Conv2d(2, random(), random(1, 4), stride=random(1, 3), bias=random())
        return layer.pytorch

    for layer in collect(options, 10):
        assert type(layer.out_channels) is int
        assert all(type(size) is int for size in (*layer.kernel_size, *layer.stride))


def test_the_schema_of_an_operator_says_the_types() -> None:
    def dims() -> Any:
        x = random_tensor(ndim=3, dim0=2, dim1=3, dim2=4)
        assert torch.sum(x, dim=random(0, 3), keepdim=random_bool()).dim() <= 3
        assert torch.clamp(x, random(-1, 0), max=random(0, 1)).shape == (2, 3, 4)
        assert x.flatten(random(0, 2), random(1, 3)).dim() >= 1
        assert torch.var(x, random(0, 3), True, True).dim() == 3  # the first overload takes two
        return torch.transpose(x, random(0, 3), random(0, 3))

    assert len(collect(dims, 10)) >= 10


def test_shapes_of_tensors() -> None:
    shapes = collect(lambda: random_tensor().shape, 60)
    assert {len(shape) for shape in shapes} == {1, 2, 3, 4, 5}
    assert all(shape[0] == 1 and all(1 <= side <= 7 for side in shape) for shape in shapes)
    assert all(shape == (2, 3, 0, 5) for shape in collect(lambda: random_tensor(4, 2, 3, 0, 5).shape, 3))
    assert all(shape == () for shape in collect(lambda: random_tensor(0).shape, 3))
    assert all(1 <= shape[0] <= 7 for shape in collect(lambda: random_tensor(1, None).shape))


def test_values_of_tensors() -> None:
    for x in collect(lambda: random_tensor(2, 3, 4).pytorch, 5):
        assert x.dtype is real_torch.float32
        assert x.requires_grad
        assert bool((x >= -1).all() & (x < 1).all())
    for x in collect(lambda: random_tensor(2, 3, 4, dtype=int).pytorch, 5):
        assert x.dtype is real_torch.int64
        assert not x.requires_grad
        assert bool((x >= -10).all() & (x <= 10).all())
    for x in collect(lambda: random_tensor(1, 9, low=3, high=random(4, 6), requires_grad=False).pytorch, 5):
        assert bool((x >= 3).all() & (x < 6).all())
        assert not x.requires_grad


def test_chosen_tensors_and_dtypes() -> None:
    for x in collect(lambda: choice_tensor([3, 5], size=(2, 2)).pytorch, 5):
        assert x.dtype is real_torch.int64
        assert set(x.reshape(-1).tolist()) <= {3, 5}
    assert all(
        len(set(x.tolist())) == 4 for x in collect(lambda: choice_tensor(4, 4, replace=False).pytorch, 5)
    )
    assert set(collect(lambda: random_dtype(["float", "bool"]))) == {*DTYPES["float"], real_torch.bool}
    assert set(collect(lambda: random_dtype(["None"]), 2)) == {None}


def test_devices() -> None:
    assert set(collect(lambda: cpu_device().value(), 2)) == {"cpu"}
    assert set(collect(lambda: random_device().value(), 5)) <= {"cpu", "cuda"}


@pytest.mark.skipif(real_torch.cuda.is_available(), reason="there is a GPU")
def test_a_test_that_needs_a_gpu_is_skipped_without_one() -> None:
    with pytest.raises(unittest.SkipTest, match="needs a GPU"):
        collect(lambda: gpu_device().value())


def test_outside_of_a_test_nothing_is_drawn() -> None:
    with pytest.raises(RuntimeError, match=r"random\(1, 6\) draws a value only while a test decorated"):
        random().to(int).value()
    with pytest.raises(RuntimeError, match=r"random_tensor\(\) draws a value only"):
        random_tensor()
