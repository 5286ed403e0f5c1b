"""Ops of the user's that say something wrong of themselves, and roundings of single numbers: what verify says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.numerics.judge import against_float64


@torch.library.custom_op("tests_of_wrong_ops::doubles", mutates_args=())
def doubles(x: Tensor) -> Tensor:
    """Changes its argument, and does not say so."""
    x.mul_(2)
    return x + 1


@torch.library.custom_op("tests_of_wrong_ops::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    return x[:, :2].contiguous()


def _gradient_of_half(_ctx: object, gradient: Tensor) -> Tensor:
    return torch.cat([gradient, torch.zeros_like(gradient)], dim=1)


doubles.register_fake(torch.empty_like)
half.register_fake(torch.empty_like)  # of another shape
half.register_autograd(_gradient_of_half)


def test_an_op_that_changes_its_argument_unsaid_is_named() -> None:
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        h = layer(x)
        return doubles(h.detach().clone()) + h  # type: ignore[no-any-return]

    report = mg.trace(step).verify(torch.randn(2, 4))
    assert not report.ok
    assert report.first is not None
    assert "doubles" in report.first.op
    assert "changes its argument and does not say so" in report.first.cause


def test_verify_holds_where_a_fake_kernel_was_wrong(caplog: pytest.LogCaptureFixture) -> None:
    step = mg.trace(lambda x: half(x).sum(1) / half(x).shape[1])
    x = torch.ones(3, 4)
    assert step(x).tolist() == [1.0, 1.0, 1.0]
    assert "half" in caplog.text
    report = step.verify(x)
    assert report.ok, str(report)


def test_a_wrong_fake_kernel_in_a_training_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(4, 4)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: Tensor) -> Tensor:
            loss = half(self.model(x)).square().mean()
            loss.backward()
            return loss

    step, beside = Step(), Step()
    for _ in range(2):
        assert torch.equal(step(torch.ones(8, 4)), beside.eager(torch.ones(8, 4)))
    assert torch.equal(step.model.weight, beside.model.weight)
    assert "half.default gives shape (8, 2); its fake kernel reports (8, 4)" in caplog.text


def _is_granted(ulps: int, numbers: int) -> bool:
    """True if each of some numbers may err by so many units in the last place, where eager errs by a tenth of one."""
    eager = torch.full((numbers,), 1.05)
    unit = torch.finfo(torch.float32).eps
    exact = eager.double() - unit / 10
    return against_float64({"x": exact}, {"x": eager}, {"x": eager + ulps * unit}).ok_for_one_step


def test_one_number_may_err_by_an_ulp_and_not_by_many() -> None:
    assert [_is_granted(ulps, 1) for ulps in (1, 2, 6)] == [True, True, False]


def test_of_many_numbers_not_all_may() -> None:
    assert [_is_granted(ulps, 10_000) for ulps in (0, 1, 2)] == [True, False, False]
