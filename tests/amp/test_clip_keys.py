"""Keys of param groups that the graph follows: `clip_grad_max_norm`, `clip_grad_norm_type`, `lr_scale`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, AdamW, Optimizer, Rprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import monograph as mg
from monograph.errors import OptimizerError
from tests.amp.mixed import (
    Recipe,
    Side,
    Step,
    adamw,
    after,
    check,
    growing,
    infinite_at,
    plain_trail,
    trail,
)
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401

# a scheduler moves on when a step is skipped, and torch wonders about it
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def with_keys(*groups: dict[str, Any], kind: type[Optimizer] = AdamW, **options: Any) -> Any:
    """An optimizer with the keys of the first group on the first layer, of the second on the rest."""

    def make(model: nn.Module) -> Optimizer:
        first, *others = model.first, model.norm, model.last
        parameters = [list(first.parameters()), [p for module in others for p in module.parameters()]]
        keys = [*groups, {}][:2]
        given = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in key.items()} for key in keys]
        return kind([{"params": p, **key} for p, key in zip(parameters, given, strict=True)], **options)

    return make


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


GROUPS = {
    "one group": [{"clip_grad_max_norm": 0.3}],
    "two groups": [
        {"clip_grad_max_norm": 0.05},
        {"clip_grad_max_norm": 0.1, "clip_grad_norm_type": 1.0, "lr_scale": 3.0},
    ],
    "norm inf": [{"clip_grad_max_norm": 0.02, "clip_grad_norm_type": math.inf}],
    "norm 'inf'": [{"clip_grad_max_norm": 0.02, "clip_grad_norm_type": "inf"}],
    "norm 1": [{"clip_grad_max_norm": 0.3, "clip_grad_norm_type": 1.0}],
    "norm 2.5": [{"clip_grad_max_norm": 0.1, "clip_grad_norm_type": 2.5}],
    "int": [{"clip_grad_max_norm": 1, "clip_grad_norm_type": 2}],
    "nothing is cut": [{"clip_grad_max_norm": math.inf}],
    "all is cut": [{"clip_grad_max_norm": 0.0}],
    "None": [{"clip_grad_max_norm": None, "lr_scale": None}],
    "lr_scale": [{"lr_scale": 0.5}],
    "lr_scale int": [{"lr_scale": 2}, {"lr": 1, "lr_scale": 0.01}],
    "lr_scale of a tensor": [{"lr": torch.tensor(0.02), "lr_scale": 0.5}],
    "lr_scale a tensor": [{"lr_scale": torch.tensor(0.5)}],
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", GROUPS)
def test_the_keys_of_a_group(name: str) -> None:
    check(Recipe(with_keys(*GROUPS[name], lr=0.01), scheduler=halving), infinite_at(count=4))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["two groups", "norm inf", "lr_scale of a tensor"])
def test_the_keys_of_a_group_under_a_scaler(name: str) -> None:
    recipe = Recipe(with_keys(*GROUPS[name], lr=0.01), scaler=growing, scheduler=halving)
    check(recipe, infinite_at(0, 2, count=5))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Rprop, {"foreach": True}),
        (ASGD, {"lr": 0.05}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (AdamW, {"fused": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("scaler", [None, growing], ids=["", "scaler"])
def test_lr_scale_scales_what_begins_as_the_rate(kind: Any, options: Any, scaler: Any) -> None:
    make = with_keys({"lr_scale": 0.5, "clip_grad_max_norm": 0.2}, kind=kind, **options)
    check(Recipe(make, scaler=scaler), infinite_at(*([0, 3] if scaler else [])), eager=False)


def set_keys(**keys: Any) -> Callable[[Side], None]:
    return lambda side: side.optimizer.param_groups[0].update(keys)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("groups", "change", "builds"),
    [
        ({"clip_grad_max_norm": 0.2}, set_keys(clip_grad_max_norm=0.1), 1),
        ({"clip_grad_max_norm": 0.2}, set_keys(clip_grad_max_norm=math.inf), 2),
        ({"clip_grad_max_norm": math.inf}, set_keys(clip_grad_max_norm=0.1), 2),
        ({"clip_grad_max_norm": 2}, set_keys(clip_grad_max_norm=1), 2),
        ({"clip_grad_max_norm": 0.2}, set_keys(clip_grad_max_norm=None), 2),
        ({}, set_keys(clip_grad_max_norm=0.1), 2),
        ({"clip_grad_max_norm": 0.2, "clip_grad_norm_type": 2.0}, set_keys(clip_grad_norm_type=1.0), 2),
        ({"clip_grad_max_norm": 0.2, "clip_grad_norm_type": 2.0}, set_keys(clip_grad_norm_type=math.inf), 2),
        ({"lr_scale": 0.5}, set_keys(lr_scale=0.25), 1),
        ({}, set_keys(lr_scale=0.25), 2),
    ],
    ids=lambda item: str(item) if isinstance(item, dict) else "",
)
def test_keys_move_between_steps(groups: Any, change: Any, builds: int) -> None:
    check(Recipe(with_keys(groups)), infinite_at(count=4), after(1, change), builds=builds, eager=False)


def test_a_scheduler_moves_the_rate_that_is_scaled() -> None:
    def one_cycle(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=10)

    check(Recipe(with_keys({"lr_scale": 0.5, "clip_grad_max_norm": 0.2}), scheduler=one_cycle))


def test_keys_are_part_of_the_state() -> None:
    recipe = Recipe(with_keys({"clip_grad_max_norm": 0.2, "clip_grad_norm_type": 1.0, "lr_scale": 0.5}))
    expected = plain_trail(recipe, infinite_at())
    side = recipe.side()
    step = Step(recipe, side)
    made = trail(side, step, infinite_at()[:3])
    saved = step.state_dict()
    other = Recipe(with_keys({"clip_grad_max_norm": 0.9, "clip_grad_norm_type": 1.0, "lr_scale": 0.1})).side()
    resumed = Step(recipe, other)
    resumed.load_state_dict(saved)
    for batch in infinite_at()[3:]:
        loss = resumed(*batch)
        made.append({"loss": loss.detach().clone(), **other.state()})
    assert_same(expected, made, "step")
    assert other.optimizer.param_groups[0]["clip_grad_max_norm"] == 0.2


class Manual(mg.Graph):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.add_optimizer(side.optimizer, manual=True)
        self.optimizer = side.optimizer
        if side.scaler is not None:
            self.set_grad_scaler(side.scaler)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.one_case
@pytest.mark.parametrize("scaler", [None, growing], ids=["", "scaler"])
def test_an_optimizer_that_build_steps(scaler: Any) -> None:
    recipe = Recipe(with_keys({"clip_grad_max_norm": 0.1, "lr_scale": 0.5}), scaler=scaler)
    batches = infinite_at(*([2] if scaler else []))
    expected = plain_trail(recipe, batches)
    for eager in (True, False):
        side = recipe.side()
        step = Manual(side)
        assert_same(expected, trail(side, step.eager if eager else step, batches), "step")


def test_a_limit_that_is_a_tensor_is_named() -> None:
    recipe = Recipe(with_keys({"clip_grad_max_norm": torch.tensor(0.1)}))
    with pytest.raises(OptimizerError, match="clip_grad_max_norm of a param group is a tensor"):
        Step(recipe, recipe.side())(*infinite_at()[0])


def test_gradients_that_are_kept_are_the_clipped_ones() -> None:
    recipe = Recipe(adamw)
    side = recipe.side()
    side.optimizer.param_groups[0]["clip_grad_max_norm"] = 0.1
    step = Step(recipe, side)
    step.config.keep_gradients()
    step(*infinite_at()[0])
    norm = nn.utils.get_total_norm([p.grad for p in side.model.parameters()])
    assert 0.09 < float(norm) < 0.1


def test_a_key_that_is_taken_away_is_a_new_build() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_scale": 0.5}], lr=0.1)
    step = mg.train_graph(model, nn.MSELoss(), optimizer)
    x = torch.randn(3, 2)
    step(x, x)
    del optimizer.param_groups[0]["lr_scale"]
    before = model.weight.detach().clone()
    (gradient,) = torch.autograd.grad(nn.MSELoss()(model(x), x), model.weight)
    step(x, x)
    assert torch.equal(model.weight, before.add(gradient, alpha=-0.1))
    assert "a number that the step reads is gone" in step.builds[1].reason
