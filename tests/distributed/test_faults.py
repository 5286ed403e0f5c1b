"""A rank that dies, hangs, fails, or takes another step: every other one says so by name, and its graph goes no further."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

import monograph as mg
from tests.distributed.processes import Group, Outcome
from tests.support import assert_same

TIMEOUT = 8.0
# (what one rank does, which one, how many there are)
CASES = {
    "no fault": ("", 1, 2),
    "killed": ("killed", 1, 2),
    "killed of four": ("killed", 2, 4),
    "killed in an update": ("killed in an update", 1, 2),
    "stopped": ("stopped", 1, 2),
    "raises": ("raises", 1, 2),
    "late": ("late", 0, 2),
    "another model": ("another model", 1, 2),
    "another dtype": ("another dtype", 1, 2),
    "another loss": ("another loss", 1, 2),
    "another optimizer": ("another optimizer", 1, 2),
    "no more batches": ("no more batches", 1, 2),
    "wrong first batch": ("wrong first batch", 1, 2),
    "wrong later batch": ("wrong later batch", 1, 2),
    "another mesh": ("another mesh", 1, 2),
}
# of these the others know only that they do not come
WAITED_FOR = {"killed", "killed in an update", "stopped", "late", "no more batches"}


class Step(mg.Graph):
    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 7 if fault == "another model" else 6
        dtype = torch.float64 if fault == "another dtype" else torch.float32
        width = 1 << 20 if fault == "killed in an update" else width
        self.model = nn.Sequential(
            nn.Linear(4, width, dtype=dtype), nn.ReLU(), nn.Linear(width, 3, dtype=dtype)
        )
        self.unused = fault == "another loss"
        kind = torch.optim.Adadelta if fault == "another optimizer" else torch.optim.SGD
        self.add_optimizer(kind(self.model.parameters(), lr=0.1))
        self.config.backend("aten")
        if fault == "killed in an update":
            self.config.enable_zero(stage=1)
        else:
            self.config.enable_data_parallel()

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self.model[0](x) if self.unused else self.model(x)
        loss = nn.functional.cross_entropy(made, y)
        loss.backward()
        return loss


def _kill_once_changed(rows: torch.Tensor) -> None:
    """End this process as soon as these are written: the other one has not got them then."""
    before = rows.clone()
    while torch.equal(rows, before):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def training(fault: str, rank_of_fault: int) -> list[float]:
    """Five steps; one rank does something else from the start, or in the fourth."""
    is_here = dist.get_rank() == rank_of_fault
    step = Step(fault if is_here or fault == "killed in an update" else "")
    dtype = next(step.model.parameters()).dtype
    x, y = torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))
    losses: list[float] = []
    if is_here and fault == "wrong first batch":
        x = x[:, 1:]
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    try:
        for number in range(5):
            if is_here and number == 3:
                if fault == "no more batches":
                    break
                if fault == "wrong later batch":
                    x = x[:, 1:]
                if fault == "late":
                    time.sleep(1.5 * TIMEOUT)
                if fault == "killed in an update":
                    Thread(target=_kill_once_changed, args=(step.model[0].weight.detach()[-1],)).start()
                if fault in ("killed", "stopped"):
                    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            losses.append(float(step(x, y + 5 if is_here and number == 3 and fault == "raises" else y)))
    except mg.DistributedError:
        with pytest.raises(mg.MonographError, match="cannot go on"):
            step(x, y)
        if not losses:
            assert_same(before, [parameter.detach() for parameter in step.model.parameters()])
        raise
    return losses


def shared_training(fault: str, rank_of_fault: int) -> None:
    """One step on tensors that ranks share; those of one rank are on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (2, 1))
    model = distribute_module(nn.Linear(4, 2), mesh)
    step = mg.train_graph(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    is_here = dist.get_rank() == rank_of_fault
    x, y = torch.randn(2, 4), torch.randn(2, 2)
    placements = [Shard(0), Replicate()]
    shared = [
        DTensor.from_local(item, other, placements)
        if is_here
        else DTensor.from_local(item, mesh, placements[:1])
        for item in (x, y)
    ]
    step(*shared)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """All at once: they mostly wait."""
    groups = {
        name: Group(
            shared_training if name == "another mesh" else training, size, fault, rank, seconds=TIMEOUT
        )
        for name, (fault, rank, size) in CASES.items()
    }
    return {
        name: group.results(stopped=[CASES[name][1]] if name == "stopped" else [])
        for name, group in groups.items()
    }


def test_without_a_fault_all_train(outcomes: dict[str, list[Outcome]]) -> None:
    assert [len(outcome.value) for outcome in outcomes["no fault"]] == [5, 5]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("killed", "rank 1 is gone or stopped: rank 1 was last in step 2"),
        ("killed of four", "rank 2 is gone or stopped: rank 2 was last in step 2"),
        ("killed in an update", "rank 1 is gone or stopped: rank 1 was last in step 3"),
        ("stopped", "rank 1 is gone or stopped: rank 1 was last in step 2"),
        ("no more batches", "rank 1 is gone or stopped: rank 1 was last in step 2"),
        (
            "wrong first batch",
            "rank 1 could not build its step: CaptureError: capture failed: RuntimeError: a and b must",
        ),
        (
            "wrong later batch",
            "rank 1 could not build its step: CaptureError: capture failed: RuntimeError: a",
        ),
        ("another mesh", "rank 1 did not come to agree on the collectives of this step within 8 seconds"),
        ("raises", "rank 1 failed in step 3 (build 0): IndexError: Target "),
        (
            "late",
            "rank 0 is late: rank 0 was last in step 2 (build 0), and the others waited in step 3 (build 0)",
        ),
        (
            "another model",
            "rank 1 differs from the others: it has model.0.weight: float32[7, 4], and elsewhere there is",
        ),
        (
            "another dtype",
            "rank 1 differs from the others: it has model.0.weight: float64[6, 4], and elsewhere",
        ),
        (
            "another optimizer",
            "it has optimizer Adadelta of 4 tensors, and elsewhere there is optimizer SGD of 4",
        ),
        ("another loss", "rank 1 would run other collectives than the others: collective"),
    ],
)
def test_survivors_name_the_rank(outcomes: dict[str, list[Outcome]], case: str, said: str) -> None:
    fault, rank, size = CASES[case]
    for survivor in set(range(size)) - {rank}:
        found: Any = outcomes[case][survivor]
        assert isinstance(found.error, mg.DistributedError), found
        assert said in found.error.message
        assert "torchrun" in found.error.hint
        assert ("drop_last=True" in found.error.hint) is (fault in WAITED_FOR)
        assert found.seconds < 120
    there = outcomes[case][rank]
    if fault == "raises":
        assert isinstance(there.error, IndexError)
    elif fault in ("wrong first batch", "wrong later batch"):
        assert isinstance(there.error, mg.CaptureError)
    elif fault == "no more batches":
        assert len(there.value) == 3
    elif fault in ("killed", "killed in an update", "stopped"):
        assert not there.is_alive
    else:
        assert isinstance(there.error, mg.DistributedError)
