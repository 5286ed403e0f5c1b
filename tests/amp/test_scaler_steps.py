"""What build() may do to gradients under a gradient scaler: clip, read, set and keep them, and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from tests.amp.mixed import (
    Classifier,
    Recipe,
    Step,
    adamw,
    check,
    growing,
    infinite_at,
    plain_trail,
    sgd,
    trail,
)
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401

# --- one optimizer ---------------------------------------------------------------------------------------------------


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_norm_one_by_one(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1.0, foreach=False)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def set_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad + 0.01 * parameter.detach()


def change_one(model: nn.Module) -> None:
    model.last.bias.grad.mul_(0.5)


def set_one_unread(model: nn.Module) -> None:
    model.last.bias.grad = torch.full((3,), 0.25)


def fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        (clip_norm, adamw),
        (clip_norm, fused),
        (clip_norm_one_by_one, sgd),
        (clip_value, adamw),
        (set_all, adamw),
        (set_all, fused),
        (change_one, adamw),
        (set_one_unread, fused),
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_are_unscaled_when_build_looks_at_them(change: Any, optimizer: Any) -> None:
    check(Recipe(optimizer, scaler=growing, unscaled=change), infinite_at(1, 4))


def with_hooks() -> nn.Module:
    """The limits cut scaled gradients only: unscaled ones are a thousand times smaller."""
    model = Classifier()

    def cut(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5).clamp_(-20, 20)

    model.first.weight.register_hook(lambda gradient: gradient.clamp(-50, 50))
    model.last.weight.register_post_accumulate_grad_hook(cut)
    return model


@pytest.mark.one_case
@pytest.mark.parametrize("change", [None, clip_norm], ids=["", "clip"])
def test_hooks_see_scaled_gradients(change: Any) -> None:
    check(Recipe(adamw, with_hooks, scaler=growing, unscaled=change), infinite_at(2))


@pytest.mark.one_case
@pytest.mark.parametrize("optimizer", [adamw, fused], ids=["adamw", "fused"])
@pytest.mark.parametrize("change", [None, clip_norm], ids=["", "clip"])
def test_kept_gradients_are_those_of_eager_mode(change: Any, optimizer: Any) -> None:
    def gradients(found: list[Any]) -> Callable[..., None]:
        return lambda _index, side: found.append([p.grad.clone() for p in side.model.parameters()])

    recipe, plain, ours = Recipe(optimizer, scaler=growing, unscaled=change), [], []
    expected = plain_trail(recipe, infinite_at(2), gradients(plain))
    side = recipe.side()
    step = Step(recipe, side)
    step.config.keep_gradients()
    assert_same(expected, trail(side, step, infinite_at(2), gradients(ours)), "step")
    assert_same(plain, ours, "gradients")


def partly_frozen(model: nn.Module) -> Optimizer:
    model.first.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    return sgd(model)


def test_parameters_that_are_frozen_or_have_no_gradient() -> None:
    check(Recipe(partly_frozen, scaler=growing, decay=0.9), infinite_at(0, 3))
