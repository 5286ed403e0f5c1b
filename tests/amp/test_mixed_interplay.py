"""A scaler, autocast, clipping keys and an average together with micro-batches, kept gradients, and other captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import monograph as mg
from tests.amp.mixed import (
    Batch,
    Classifier,
    Recipe,
    Side,
    Step,
    adamw,
    averaged,
    check,
    cross_entropy,
    growing,
    infinite_at,
    plain_trail,
    trail,
)
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401


def keyed(model: nn.Module) -> Optimizer:
    return AdamW([{"params": list(model.parameters()), "clip_grad_max_norm": 0.2, "lr_scale": 0.5}], lr=0.01)


RECIPE = Recipe(keyed, scaler=growing, amp=torch.bfloat16, decay=0.9)


def pairs_of_batches() -> list[Batch]:
    made = zip(infinite_at(1, 3), infinite_at(count=12)[6:], strict=True)
    return [(torch.cat([a[:4], c[:4]]), torch.cat([b[:4], d[:4]])) for (a, b), (c, d) in made]


def accumulated_step(side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two micro-batches; the loss of each counts by half."""
    side.optimizer.zero_grad()
    losses = []
    for part in (slice(0, 4), slice(4, 8)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(side.model, x[part], y[part])
        side.scaler.scale(loss / 2).backward()
        losses.append(loss.detach())
    group = side.optimizer.param_groups[0]
    side.scaler.unscale_(side.optimizer)
    nn.utils.clip_grad_norm_(group["params"], 0.2)
    rate, group["lr"] = group["lr"], group["lr"] * 0.5
    side.scaler.step(side.optimizer)
    side.scaler.update()
    group["lr"] = rate
    side.average.update_parameters(side.model)
    return torch.stack(losses)


@pytest.mark.one_case
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_micro_batches(eager: bool) -> None:
    plain = RECIPE.side()
    plain.average = averaged(plain.model, 0.9)
    expected = trail(plain, lambda x, y: accumulated_step(plain, x, y), pairs_of_batches())
    side = RECIPE.side()
    step = Step(RECIPE, side)
    step.config.set_gradient_accumulation_steps(2)
    assert_same(expected, trail(side, step.eager if eager else step, pairs_of_batches()), "step")


class EverySecond(mg.Graph):
    """Gradients stay from one call to the next; every second call steps."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.add_optimizer(side.optimizer, manual=True)
        self.optimizer = side.optimizer
        self.set_grad_scaler(side.scaler)
        self.config.keep_gradients()

    def build(self, x: torch.Tensor, y: torch.Tensor, steps: bool) -> torch.Tensor:
        loss = cross_entropy(self.model, x, y)
        loss.backward()
        if steps:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


@pytest.mark.long
def test_gradients_that_stay_are_scaled_until_the_step() -> None:
    recipe, batches = Recipe(adamw, scaler=growing), infinite_at(2, count=8)
    plain, side = recipe.side(), recipe.side()
    step, expected = EverySecond(side), []
    torch.manual_seed(1)
    for index, batch in enumerate(batches):
        loss = cross_entropy(plain.model, *batch)
        plain.scaler.scale(loss).backward()
        if index % 2:
            plain.scaler.unscale_(plain.optimizer)
            nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
            plain.scaler.step(plain.optimizer)
            plain.scaler.update()
            plain.optimizer.zero_grad()
        expected.append({"loss": loss.detach().clone(), **plain.state()})
    torch.manual_seed(1)
    for index, batch in enumerate(batches):
        loss = step(*batch, steps=bool(index % 2))
        assert_same(expected[index], {"loss": loss.detach(), **side.state()}, f"step {index}")
    assert len(step.builds) == 2


@pytest.mark.long
def test_compiled_before_the_first_step() -> None:
    expected = plain_trail(RECIPE, infinite_at(2))
    side = RECIPE.side()
    step = Step(RECIPE, side)
    step.compile(mg.spec((5, 6)), mg.spec((5,), torch.int64))
    assert_same(expected, trail(side, step, infinite_at(2)), "step")
    assert len(step.builds) == 1


@torch.library.custom_op("mixed_interplay::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An op without fake kernel: its capture runs on values."""
    return x * 2


def _doubled_backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


doubled.register_autograd(_doubled_backward)


class WithCustomOp(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(doubled(self.first(x)).relu())


@pytest.mark.long
def test_a_capture_on_values() -> None:
    check(
        Recipe(keyed, WithCustomOp, scaler=growing, amp=torch.bfloat16, decay=0.9),
        infinite_at(2),
        eager=False,
    )
