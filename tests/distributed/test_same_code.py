"""Ranks run the same code: one choice of kernels for all, and one step at which compiled code takes over."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import monograph as mg
from monograph.backends.beside import CompiledBeside
from monograph.distributed.agreement import Agreement, Ranks
from monograph.distributed.agreement.signature import signature_of
from monograph.kernels.tuned import remembered
from tests.distributed.processes import on_ranks
from tests.distributed.staged import place


def _choices() -> list[str]:
    """Each rank measures something else, and remembers it somewhere else."""
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONOGRAPH_CACHE_DIR"] = folder
        times = [{"default": 1.0, "other": 0.5}, {"default": 1.0, "other": 2.0}]
        found = []
        for name in ("first", "second"):
            if rank == (name == "second"):  # the other one asks later
                found.append(remembered((name,), ("default", "other"), lambda: times[rank]).winner)
            dist.barrier()
            if len(found) < 1 + (name == "second"):
                found.append(remembered((name,), ("default", "other"), lambda: times[rank]).winner)
        return found


def _first_swap() -> int:
    """The first step that may run other code; the ranks are ready for it at different steps."""
    rank = dist.get_rank()
    agreement = Agreement(Ranks("swaps"))
    agreement.confirm(signature_of([]))
    for step in range(12):
        if rank == 0:
            dist.barrier()  # the other one has said by now whether it is ready
        may = agreement.swaps("build", step, is_ready=step >= 2 + 4 * rank)
        if rank == 1:
            dist.barrier()
        dist.barrier()  # as collectives of a step do
        if may:
            return step
    return -1


def _agreed() -> tuple[list[str], int]:
    return _choices(), _first_swap()


def test_choices_and_swaps_are_the_same() -> None:
    (choices, step), other = on_ranks(_agreed)
    assert choices == ["other", "default"]
    assert step == 8
    assert other == (choices, step)


class Step(mg.Graph):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.backend("inductor", background=True)
        if kind == "pipeline":
            place(self.model, (("0", 0), ("1", 1)))
            self.config.set_gradient_accumulation_steps(2)
        elif kind == "zero":
            self.config.enable_zero(stage=1, shard_min_size=0)
        else:
            self.config.enable_data_parallel()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def _has_failed(build: Any) -> bool:
    return any("could not be used" in note for note in build.notes)


def _step_while_a_thread_works(step: Step, x: torch.Tensor, sign: Path) -> None:
    """Rank 1 takes part when a thread of rank 0 says so, which runs while rank 0 waits in its step."""
    if dist.get_rank() == 0:
        threading.Timer(0.2, sign.touch).start()
    while dist.get_rank() == 1 and not sign.exists():
        time.sleep(0.01)
    step(x)


def _trained(kind: str, folder: Path) -> tuple[list[Any], int, str]:
    """Parameters that all have alike, the number of steps until other code ran, and the backend in the end."""
    step, begun, is_done = Step(kind), [0], CompiledBeside.is_done
    if dist.get_rank() == 1:
        CompiledBeside.is_done = lambda self: begun[0] > 6 and is_done(self)  # type: ignore[method-assign]
    seed = 0 if kind == "pipeline" else dist.get_rank()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    while not (step.builds and (step.builds[0].backend == "inductor" or _has_failed(step.builds[0]))):
        begun[0] += 1
        step(x)
        time.sleep(0.02)  # for the compilers
    _step_while_a_thread_works(step, x, folder / "sign")
    parameters = [parameter.detach().clone() for parameter in step.model.parameters()]
    return [] if kind == "pipeline" else parameters, begun[0], step.builds[0].backend


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["copies", *(pytest.param(kind, marks=pytest.mark.ranks) for kind in ("zero", "pipeline"))]
)
def test_compiled_code_takes_over_at_one_step(kind: str, tmp_path: Path) -> None:
    (parameters, step, backend), (others, at, other_backend) = on_ranks(_trained, kind, tmp_path, seconds=100)
    assert step == at > 6
    assert backend == other_backend == "inductor"
    assert all(map(torch.equal, parameters, others))
