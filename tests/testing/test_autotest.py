"""@autotest: how tests are written and called, what counts as a case, what is checked in a graph."""

# ruff: noqa: F403, F405, PT009  as tests for AutoTest are written: names by a star, assertions of unittest

from __future__ import annotations

import inspect
import unittest
from typing import Any

import pytest
import torch as real_torch

import monograph as mg
from monograph.testing import AlignmentError
from monograph.testing.dual import *
from monograph.testing.dual import calls as dual_calls


# fmt: off
# the test of the article, as it is written there
@pytest.mark.long
@autotest(check_graph = True)
def test_flow_matmul_with_random_data(test_case):
    device = random_device()
    k = random(1, 6)
    x = random_tensor(ndim=2, dim1=k).to(device)
    y = random_tensor(ndim=2, dim0=k).to(device)
    z = torch.matmul(x, y)
    return z
# fmt: on


class TestOfUnittest(unittest.TestCase):
    @autotest(n=2)
    def test_with_its_own_name_for_self(test_case):
        test_case.assertIsInstance(test_case, TestOfUnittest)
        m = torch.nn.ELU(alpha=random() | nothing())
        m.train(random())
        device = random_device()
        m.to(device)
        x = random_pytorch_tensor().to(device)
        y = m(x)
        return y

    @autotest(n=2, auto_backward=False)
    def test_shapes_from_a_tensor(self):
        shape = random_tensor().oneflow.shape
        x1 = random_tensor(len(shape), *shape, requires_grad=False)
        x2 = random_tensor(len(shape), *shape, requires_grad=False)
        return torch.gt(x1, oneof(x2, random().to(int), random().to(float)))


class TestOfPytest:
    @autotest(n=2)
    def test_with_self(self):
        assert isinstance(self, TestOfPytest)
        return random_tensor().sum()


@autotest(n=2)
def test_without_argument():
    return random_tensor().sum()


@pytest.fixture
def factor() -> int:
    return 3


@pytest.mark.parametrize("power", [1, 2])
@autotest(n=2)
def test_with_fixture_and_parameter(test_case, factor, power):
    test_case.assertEqual(factor, 3)
    return random_tensor() ** power * factor


def test_visible_signatures() -> None:
    assert not inspect.signature(test_flow_matmul_with_random_data).parameters
    assert list(inspect.signature(test_with_fixture_and_parameter).parameters) == ["factor", "power"]
    assert list(inspect.signature(TestOfPytest.test_with_self).parameters) == ["self"]


def test_called_by_hand() -> None:
    seen = []

    @autotest(n=1)
    def check(test_case, times=2):
        seen.append((type(test_case), times))
        return random_tensor() * times

    check()
    check(self_like := unittest.TestCase())
    check(self_like, 3)
    check(test_case=self_like, times=4)
    assert [times for _, times in seen] == [2, 2, 3, 4]
    assert {kind for kind, _ in seen} == {unittest.TestCase}


def aligned_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What is aligned from now on: targets and options."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    align = dual_calls.align

    def watched(target: Any, *args: Any, **options: Any) -> Any:
        seen.append((target, options))
        return align(target, *args, **options)

    monkeypatch.setattr(dual_calls, "align", watched)
    return seen


def test_functions_modules_methods_and_operators_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = aligned_calls(monkeypatch)

    @autotest(n=1)
    def check() -> Any:
        x = random_tensor(ndim=2)
        y = torch.exp(x) + torch.nn.functional.relu(x)
        z = torch.nn.Linear(x.shape[1], 3)(y.mul(2).add_(1))
        return (2 - z[..., :1]).T

    check()
    names = [getattr(target, "__name__", type(target).__name__) for target, _ in seen]
    assert names == ["exp", "relu", "__add__", "mul", "add_", "Linear", "__getitem__", "__rsub__", "T"]


def test_the_body_goes_on_with_what_eager_mode_gave() -> None:
    @autotest(n=2)
    def check() -> Any:
        x = random_tensor(ndim=1, requires_grad=False)
        y = x * 2
        assert real_torch.equal(y.pytorch, x.pytorch * 2)
        y.add_(1)
        assert real_torch.equal(y.pytorch, x.pytorch * 2 + 1)
        m = torch.nn.BatchNorm1d(3)
        m(random_tensor(ndim=2, dim0=4, dim1=3))
        assert int(m.num_batches_tracked) == 1
        assert torch.is_tensor(y)
        assert isinstance(m, torch.nn.Module)
        return torch.nn.Parameter(y).sum()

    check()


def test_gradients_of_the_result_reach_the_inputs() -> None:
    grads = []

    def body() -> Any:
        x = random_tensor(ndim=1, dim0=3)
        grads.append(x)
        return x * 2

    autotest(n=2, check_graph=False)(body)()
    assert all(x.grad is not None and not (x.grad.pytorch == 2).all() for x in grads)
    grads.clear()
    autotest(n=2, check_graph=False, check_grad_use_random_data=False)(body)()
    assert all((x.grad.pytorch == 2).all() for x in grads)
    grads.clear()
    autotest(n=2, check_graph=False, auto_backward=False)(body)()
    assert all(x.grad is None for x in grads)


def test_what_auto_backward_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = aligned_calls(monkeypatch)

    def body() -> Any:
        return random_tensor(ndim=1) * 2

    for setting, wanted in ((True, True), ("auto", True), (False, False)):
        seen.clear()
        autotest(n=1, auto_backward=setting)(body)()
        assert [options["grad"] for _, options in seen] == [wanted]

    def whole() -> Any:
        return random_tensor(ndim=1, dtype=int) * 2

    autotest(n=1, auto_backward="auto")(whole)()
    with pytest.raises(ValueError, match="does not require grad"):
        autotest(n=1)(whole)()


@pytest.mark.long
def test_check_graph_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = aligned_calls(monkeypatch)

    def body() -> Any:
        found = torch.unique_consecutive(random_tensor(dtype=int, low=0, high=4, ndim=1, requires_grad=False))
        return random_tensor(ndim=1) * found.sum()

    for setting in (False, "ValidatedFalse"):
        autotest(n=3, check_graph=setting)(body)()
    assert seen == []
    with pytest.raises(AlignmentError) as caught:
        autotest(n=3)(body)()
    assert isinstance(caught.value.__cause__, mg.CaptureError)
    assert 'check_graph="ValidatedFalse"' in "\n".join(caught.value.__notes__)


def test_cases_that_pytorch_refuses_are_not_counted() -> None:
    good = []

    @autotest(n=20, check_graph=False)
    def some() -> Any:
        x = random_tensor(ndim=2, dim0=random(1, 4), dim1=random(1, 4))
        y = torch.mm(x, x)
        good.append(y)
        return y

    some()
    assert len(good) >= 20

    @autotest(n=20)
    def none() -> Any:
        return torch.mm(random_tensor(ndim=2, dim1=2), random_tensor(ndim=2, dim0=3))

    with pytest.raises(
        ValueError, match=r"none is stuck: PyTorch itself refused \d+ of \d+ cases, the last with"
    ):
        none()


def test_no_graph_is_made_for_a_case_that_pytorch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = aligned_calls(monkeypatch)

    @autotest(n=5)
    def check() -> Any:
        x = torch.exp(random_tensor(ndim=2, dim1=2))
        return torch.mm(x, x.new_zeros(3, 1))

    with pytest.raises(ValueError, match="refused 50 of 50 cases"):
        check()
    assert seen == []


def test_a_fault_of_the_tool_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise KeyError("in the tool")

    monkeypatch.setattr(dual_calls, "align", broken)

    @autotest(n=2)
    def check() -> Any:
        return torch.exp(random_tensor())

    with pytest.raises(KeyError, match="in the tool"):
        check()


def test_an_assertion_of_the_test_itself_fails() -> None:
    @autotest(n=2, check_graph=False)
    def check(test_case) -> Any:
        x = random_tensor(ndim=1)
        test_case.assertGreater(len(x), 5)

    with pytest.raises(AssertionError, match="not greater than 5"):
        check()


@pytest.mark.long
def test_in_one_case_of_two_numbers_are_complex() -> None:
    kinds = set()

    @autotest(n=20, include_complex=True)
    def check() -> Any:
        x = random_tensor(ndim=1)
        kinds.add(x.dtype)
        assert (x * x).dtype is x.dtype
        return torch.sin(x) * x

    check()
    assert kinds == {real_torch.float32, real_torch.complex64}


@pytest.mark.long
def test_changes_of_memory_that_arguments_share_are_aligned() -> None:
    @autotest(n=2)
    def check() -> Any:
        x = random_tensor(ndim=2, dim0=3, dim1=4) * 1
        x[:, 1] = x[:, 2]
        x.add_(x)
        x[0].add_(x[1])
        y = random_tensor(ndim=2, dim0=3, dim1=4, requires_grad=False)
        y[1] = y[0]
        return x * y

    check()


def test_modules_and_functions_of_the_user() -> None:
    class Own(real_torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = real_torch.nn.Linear(2, 2)

        def forward(self, x: real_torch.Tensor) -> real_torch.Tensor:
            return self.inner(x).tanh()

    @autotest(n=2)
    def check() -> Any:
        own = Own()
        x = random_tensor(ndim=2, dim1=2)
        y = dual(own)(x) + own(x) + real_torch.ones(2) * x
        return dual(lambda a: a.sin() * 2)(y)

    check()


def test_the_own_class_can_derive_from_the_dual_one() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    assert real_torch.equal(Twice()(real_torch.ones(2)), real_torch.full((2,), 2.0))


def test_the_random_numbers_of_the_process_stay_as_they_were() -> None:
    real_torch.manual_seed(3)
    before = real_torch.get_rng_state()

    @autotest(n=2)
    def check() -> Any:
        return torch.nn.Dropout(0.5)(random_tensor())

    check()
    assert real_torch.equal(before, real_torch.get_rng_state())


def test_outside_of_a_test_the_dual_torch_is_just_torch() -> None:
    y = torch.nn.functional.relu(torch.tensor([-1.0, 2.0]))
    assert y.tolist() == [0.0, 2.0]
    assert torch.float32 is real_torch.float32
    assert isinstance(y, torch.Tensor)
