"""Models of `benchmarks/workloads` as pipelines of two stages: the bits of one process that takes the same micro-batches."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.distributed.staged import place
from tests.distributed.training import OPTIMIZERS, WORKLOADS, Case, Wrong, assert_right
from tests.support import assert_same

MICRO_BATCHES = 2


def halves(model: nn.Module, *, last: tuple[str, ...] = ()) -> tuple[tuple[str, int], ...]:
    """Modules with parameters, in order: the second half of them in stage 1, or those whose path begins so."""
    own = [path for path, module in model.named_modules() if list(module.parameters(recurse=False))]
    if last:
        return tuple((path, int(path.startswith(last))) for path in own)
    return tuple((path, int(index >= len(own) // 2)) for index, path in enumerate(own))


class Step(mg.Graph):
    def __init__(
        self, workload: Any, model: nn.Module, optimizer: Any, stages: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__()
        self.model, self.loss_of = model, workload.loss
        self.add_optimizer(optimizer)
        place(self.model, stages)
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.backend("aten")

    def build(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(self.model(*batch[:-1]), batch[-1])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


def trained(rank: int, *, name: str, optimizer: str, last: tuple[str, ...] = ()) -> None:
    workload = WORKLOADS[name](smoke=True)
    model = workload.make_model()
    eager = copy.deepcopy(model)
    stages = halves(model, last=last)
    step = Step(workload, model, OPTIMIZERS[optimizer](model.parameters()), stages)
    reference = OPTIMIZERS[optimizer](eager.parameters())
    generator = torch.Generator().manual_seed(1)
    for index in range(2):
        batch = workload.make_batch(generator)
        loss = step(*batch)
        reference.zero_grad()
        losses = []
        for rows in zip(*(item.chunk(MICRO_BATCHES) for item in batch), strict=True):
            part = workload.loss(eager(*rows[:-1]), rows[-1])
            (part / MICRO_BATCHES).backward()
            losses.append(part.detach())
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        reference.step()
        assert_same(torch.stack(losses), loss.detach(), f"loss {index}")
        sides = [dict([*item.named_parameters(), *item.named_buffers()]) for item in (eager, model)]
        own = [name for name in sides[0] if dict(stages).get(name.rpartition(".")[0]) == rank]
        for name in own:
            assert_same(sides[0][name].detach(), sides[1][name].detach(), f"{name} in step {index}")


LONG: dict[str, Case] = {
    f"{name}, {optimizer}": partial(trained, name=name, optimizer=optimizer, last=last)
    for name, optimizer, last in (
        ("mlp", "sgd", ()),
        ("mobilenet", "adamw", ()),
        ("gpt", "adamw", ("blocks.0.feed_forward", "norm", "head")),
        ("lstm", "sgd", ()),
        ("dlrm", "adamw", ("top",)),
    )
}


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_a_workload_in_stages_equals_one_process(case: str, long: Wrong) -> None:
    assert_right(case, long)
