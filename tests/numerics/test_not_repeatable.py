"""An op that differs from itself is named as such: neither the capture nor the graph is to blame."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.testing import AlignmentError, align

_CALLS = itertools.count(1)


@torch.library.custom_op("tests_of_repeats::moves", mutates_args=())
def moves(x: Tensor) -> Tensor:
    """Another number at each call, whatever the random state."""
    return x * float(next(_CALLS))


@torch.library.custom_op("tests_of_repeats::draws", mutates_args=())
def draws(x: Tensor) -> Tensor:
    """Random, by torch's generator."""
    return x * torch.rand(())


@torch.library.custom_op("tests_of_repeats::is_off_at_first", mutates_args=())
def is_off_at_first(x: Tensor) -> Tensor:
    """Another number at its first call, and never again."""
    return x * (2.0 if next(_CALLS) == 1 else 1.0)


for _op in (moves, draws, is_off_at_first):
    _op.register_fake(torch.empty_like)
    _op.register_autograd(lambda _ctx, gradient: gradient)


@pytest.fixture(autouse=True)
def _from_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_CALLS", itertools.count(1))


class Net(nn.Module):
    def __init__(self, op: object) -> None:
        super().__init__()
        self.body, self.op = nn.Linear(3, 3), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.body(x)).relu()  # type: ignore[operator, no-any-return]


def verified(op: object) -> mg.VerifyReport:
    model = Net(op)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    return step.verify(torch.randn(4, 3), torch.randn(4, 3))


def test_the_op_is_named() -> None:
    report = verified(moves)
    assert not report.ok
    assert report.first is not None
    assert report.first.op.startswith("moves = torch.ops.tests_of_repeats.moves.default(")
    assert report.first.cause.startswith("the op itself, which is not repeatable")
    assert report.first.module == "model"


def test_random_numbers_of_torch_are_repeatable() -> None:
    assert verified(draws).ok


def test_what_does_not_come_again_is_told() -> None:
    report = verified(is_off_at_first)
    assert not report.ok
    assert report.first is None
    assert "something in it is not repeatable" in str(report)


def test_align_says_so_too() -> None:
    with pytest.raises(
        AlignmentError, match="eager mode is not repeatable: run again from the same seed, result"
    ):
        align(Net(moves), torch.randn(4, 3))


def test_rounding_of_compiled_code_does_not_hide_it() -> None:
    """Eager mode is as far from float64 then as the graph is."""
    model = Net(moves)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    report = step.verify(torch.randn(4, 3), torch.randn(4, 3), against="float64")
    assert not report.ok
    assert report.first is not None
    assert "not repeatable" in report.first.cause
