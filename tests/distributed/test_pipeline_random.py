"""Random numbers in stages: each rank draws from its own generator, forward by forward, and goes on from a checkpoint bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.distributed.staged import MICRO_BATCHES, place
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


def model(num_stages: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    stages = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(num_stages))
    return nn.Sequential(*stages)


class Step(mg.Graph):
    def __init__(self, model: nn.Module, schedule: str = "1F1B", num_stages: int = 2) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        place(self.model, tuple((str(stage), stage) for stage in range(num_stages)))
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.set_pipeline_schedule(schedule)
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2 * MICRO_BATCHES, 6, generator=generator) for _ in range(4)]


class Eager:
    """By torch alone: each stage runs with the generator of its rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.1)
        self.generators = [torch.manual_seed(100 + rank).get_state() for rank in range(2)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        losses = []
        for rows in x.chunk(MICRO_BATCHES):
            hidden = rows
            for index, stage in enumerate(self.model):  # type: ignore[arg-type]
                torch.set_rng_state(self.generators[index])
                hidden = stage(hidden)
                self.generators[index] = torch.get_rng_state()
            loss = hidden.square().mean()
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses)


def own(model: Any, rank: int) -> dict[str, torch.Tensor]:
    return dict(model[rank].named_parameters())


def _drawn(schedule: str) -> Case:
    def case(rank: int) -> None:
        trained = model()
        eager, step = Eager(copy.deepcopy(trained)), Step(trained, schedule)
        expected = [eager(x) for x in batches()]
        torch.manual_seed(100 + rank)
        for index, x in enumerate(batches()):
            assert_same(expected[index], step(x).detach(), f"loss {index}")
        assert_same(eager.generators[rank], torch.get_rng_state(), "generator")
        assert_same(own(eager.model, rank), own(trained, rank), "model")
        assert "stages 0, 1 of the pipeline draw random numbers, each rank from its own" in step.explain()

    return case


def _goes_on(rank: int) -> None:
    step, other = Step(model()), Step(model())
    first, *rest = batches()
    torch.manual_seed(100 + rank)
    step(first)
    state = copy.deepcopy(step.state_dict())
    expected = [step(x).detach() for x in rest]
    other.load_state_dict(state)
    for index, x in enumerate(rest):
        assert_same(expected[index], other(x).detach(), f"loss {index}")
    assert_same(own(step.model, rank), own(other.model, rank), "model")


QUICK: dict[str, Case] = {"1f1b": _drawn("1F1B"), "gpipe": _drawn("GPipe"), "goes on": _goes_on}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_stages_draw_for_themselves(case: str, quick: Wrong) -> None:
    assert_right(case, quick)
