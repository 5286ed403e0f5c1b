"""`torch.func` on parameters that `build()` finds by their names alone: same gradients, and they are trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.utils.checkpoint import checkpoint

import monograph as mg
from tests.support import assert_same

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
FROZEN = nn.Linear(3, 1, bias=False).requires_grad_(False)


def total(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).sin().sum()


def outputs(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).sin()


def one_member(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return func.functional_call(FROZEN, {"weight": weight}, (x,))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vmap": lambda w: func.vmap(outputs)(w.t()).square().sum(),
    "vmap over the batch": lambda w: func.vmap(lambda x: (x @ w).sin().sum())(X).sum(),
    "grad": lambda w: func.grad(total)(w).square().sum(),
    "grad by an argument": lambda w: func.grad(lambda x: (x @ w).sin().sum())(X).square().sum(),
    "vjp": lambda w: func.vjp(total, w)[1](torch.ones(()))[0].square().sum(),
    "jvp": lambda w: func.jvp(total, (w,), (torch.ones_like(w),))[1],
    "jacrev": lambda w: func.jacrev(outputs)(w).square().sum(),
    "jacfwd": lambda w: func.jacfwd(outputs)(w).square().sum(),
    "hessian": lambda w: func.hessian(total)(w).square().sum(),
    "an ensemble": lambda w: func.vmap(one_member, in_dims=(0, None))(w.t()[:, None], X).square().sum(),
    "a gradient per sample": lambda w: (
        func.vmap(func.grad(lambda p, x: (x @ p).sin().sum()), in_dims=(None, 0))(w, X).square().sum()
    ),
}


class Step(mg.Graph):
    def __init__(self, w: nn.Parameter, loss: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.held, self.loss = nn.ParameterList([w]), loss
        self.add_optimizer(torch.optim.SGD([w], lr=0.1))

    def build(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        return loss


@pytest.mark.every_case
@pytest.mark.parametrize("name", LOSSES)
def test_transforms_of_a_parameter_that_is_closed_over(name: str) -> None:
    first = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    w, counterpart = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    step, optimizer = Step(w, lambda: LOSSES[name](w)), torch.optim.SGD([counterpart], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = LOSSES[name](counterpart)
            loss.backward()
            optimizer.step()
            assert_same(loss, step())
        assert_same(counterpart, w)
    assert not torch.equal(first, w)
    assert w.grad is None
    assert step.verify().ok


class Unread(torch.autograd.Function):
    """Gives a parameter a gradient, and no op the parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0]


def test_a_parameter_that_no_op_is_given_is_refused() -> None:
    w = nn.Parameter(torch.ones(3, 2))
    step = Step(w, lambda: Unread.apply(torch.ones(3, 2), w).sum())
    with pytest.raises(mg.CaptureError, match=r"held\.0 where a capture cannot see it"):
        step()
    assert w.grad is None


def test_a_parameter_that_no_capture_sees_in_a_backward_of_a_backward_is_refused() -> None:
    w, x = nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2, requires_grad=True)

    def loss() -> torch.Tensor:
        part = checkpoint(lambda given: Unread.apply(given, w), x.clone(), use_reentrant=True)
        return part.sum()

    step = Step(w, loss)
    with pytest.raises(mg.CaptureError, match=r"held\.0 where a capture cannot see it"):
        step()
    assert w.grad is None


def test_a_parameter_that_no_capture_sees_is_refused() -> None:
    """C++ code gets the parameter itself, and autograd would put its gradient there."""
    functorch = torch._C._functorch
    w = nn.Parameter(torch.ones(3, 2))

    def loss() -> torch.Tensor:
        level = functorch._vmap_increment_nesting(3, "error")
        made = functorch._add_batch_dim(w, 0, level).sin()
        total = functorch._remove_batch_dim(made, level, 3, 0).sum()
        functorch._vmap_decrement_nesting()
        return total

    step = Step(w, loss)
    with pytest.raises(mg.CaptureError, match=r"held\.0 where a capture cannot see it"):
        step()
    assert w.grad is None
    assert torch.equal(w, torch.ones(3, 2))
