"""What OneFlow's AutoTest let pass: each fault, planted into a mode, fails a test here."""

# ruff: noqa: F403, F405  names by a star, as tests for AutoTest are written

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch as real_torch

from monograph.testing import AlignmentError, Mode
from monograph.testing.dual import *
from tests.testing.spoiled import spoiled, spoiling

FEW = {"n": 3}


def check(mode: Mode, body: Callable[[], Any], **options: Any) -> str:
    """What a test with this body says if the graph is run by `mode`."""

    def test() -> Any:
        return body()

    with pytest.raises(AlignmentError) as caught:
        autotest(**{**FEW, **options}, modes=(mode,))(test)()
    return caught.value.what


def twice() -> Any:
    return random_tensor(ndim=2) * 2


def test_a_wrong_result_fails() -> None:
    assert "result" in check(spoiled(lambda result: result + 1000), twice)


def test_a_wrong_part_of_a_tuple_fails() -> None:
    def body() -> Any:
        values, _ = torch.sort(random_tensor(ndim=2, dim1=4))
        return values

    def change(result: Any) -> Any:
        return type(result)((result[0], result[1] + 1))

    assert "result" in check(spoiled(change), body)


@pytest.mark.long
def test_a_wrong_part_of_a_list_fails() -> None:
    def body() -> Any:
        return torch.split(random_tensor(ndim=1, dim0=4), 2)

    assert "result[1]" in check(spoiled(lambda result: (result[0], result[1] + 1)), body)


def test_a_wrong_gradient_fails() -> None:
    def after(_graph: Any, arguments: Any, _number: int) -> None:
        for leaf in arguments[0]:
            if isinstance(leaf, real_torch.Tensor) and leaf.grad is not None:
                leaf.grad += 1

    assert "gradient of args[0]" in check(spoiling(after), twice)


def linear() -> Any:
    return torch.nn.Linear(3, random())(random_tensor(ndim=2, dim1=3))


def test_a_wrong_update_of_parameters_fails() -> None:
    def after(graph: Any, _arguments: Any, _number: int) -> None:
        if graph.training:
            for parameter in graph.target.parameters():
                parameter += 1

    assert "parameter" in check(spoiling(after), linear)


def test_a_forgotten_buffer_fails() -> None:
    def body() -> Any:
        return torch.nn.BatchNorm1d(3)(random_tensor(ndim=2, dim0=4, dim1=3))

    def after(graph: Any, _arguments: Any, _number: int) -> None:
        graph.target.num_batches_tracked.zero_()

    assert "buffer num_batches_tracked" in check(spoiling(after), body)


def test_a_fault_of_the_second_call_only_fails() -> None:
    calls = []

    def change(result: Any) -> Any:
        calls.append(result)
        return result + 1 if len(calls) % 3 == 2 else result

    assert "result" in check(spoiled(change), twice, auto_backward=False)


def test_a_graph_that_keeps_the_values_of_its_first_call_fails() -> None:
    def make(graph: Any) -> Callable[..., Any]:
        first: list[Any] = []

        def call(*arguments: Any) -> Any:
            first.append(arguments)
            return graph(*first[0])

        return call

    assert check(Mode("stale", make), twice, auto_backward=False)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda result: result.double(), "dtype"),
        (lambda result: result.t().contiguous().t(), "stride"),
        (lambda result: result.detach(), "requires_grad"),
    ],
)
def test_another_dtype_stride_or_requires_grad_fails(change: Callable[[Any], Any], what: str) -> None:
    def body() -> Any:
        return random_tensor(ndim=2, dim0=3, dim1=4) * 2

    assert what in check(spoiled(change), body)


@pytest.mark.long
def test_gradients_of_nan_are_compared_as_bits() -> None:
    def after(_graph: Any, arguments: Any, _number: int) -> None:
        for leaf in arguments[0]:
            if isinstance(leaf, real_torch.Tensor) and leaf.grad is not None:
                leaf.grad.fill_(float("nan"))

    assert "gradient" in check(spoiling(after), twice)


@pytest.mark.long
def test_keyword_arguments_of_modules_are_checked() -> None:
    class Scaled(real_torch.nn.Module):
        def forward(self, x: real_torch.Tensor, *, factor: float = 1.0) -> real_torch.Tensor:
            return x * factor

    seen = []

    def change(result: Any) -> Any:
        seen.append(result)
        return result + 1

    def body() -> Any:
        return dual(Scaled())(random_tensor(ndim=1), factor=random(2, 4))

    assert "result" in check(spoiled(change), body)
    assert seen


@pytest.mark.long
def test_complex_numbers_are_checked() -> None:
    def change(result: Any) -> Any:
        return result + 1 if result.is_complex() else result

    def body() -> Any:
        return torch.sin(random_tensor(ndim=1, dim0=3))

    assert "result" in check(spoiled(change), body, n=20, include_complex=True)


def test_changes_in_place_are_checked() -> None:
    def after(_graph: Any, arguments: Any, _number: int) -> None:
        arguments[0][0].add_(1)

    def body() -> Any:
        x = random_tensor(ndim=1, requires_grad=False)
        x[0] = 5

    assert "args[0] afterwards" in check(spoiling(after), body)


@pytest.mark.long
def test_with_given_tolerances_values_may_differ() -> None:
    def test() -> Any:
        return twice()

    slightly = spoiled(lambda result: result * (1 + 1e-6))
    autotest(n=3, rtol=1e-3, modes=(slightly,))(test)()
    autotest(n=3, check_allclose=False, modes=(spoiled(lambda result: result + 9),))(test)()
    with pytest.raises(AlignmentError):
        autotest(n=3, modes=(slightly,))(test)()
