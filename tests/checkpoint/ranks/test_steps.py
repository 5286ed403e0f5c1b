"""CheckpointManager in a group: steps that all ranks save together, and what is left when one of them is killed."""

from __future__ import annotations

import os
import random
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import monograph as mg
from monograph.checkpoint.load import load_checkpoint
from monograph.checkpoint.read import Process
from tests.checkpoint.ranks.states import expected, rank_state
from tests.checkpoint.ranks.test_ranks import refusal
from tests.checkpoint.same import assert_equal, difference
from tests.distributed.processes import Group, on_ranks


def managing(folder: Path) -> dict[str, Any]:
    rank, found = dist.get_rank(), dict[str, Any]()
    manager = mg.CheckpointManager(folder / "steps", keep=2, every=2)
    found["none yet"] = manager.latest()
    found["paths"] = [manager.save(lambda step=step: rank_state(step), step=step) for step in range(7)]
    dist.barrier()
    found["kept"] = sorted(os.listdir(folder / "steps"))
    found["latest"] = manager.latest()
    found["state"] = difference(expected(rank, 6), mg.load(found["latest"]))
    found["again"] = manager.save(rank_state(6), step=6)
    found["of another run"] = refusal(mg.CheckpointManager(folder / "steps").save, rank_state(6), step=6)
    found["other steps"] = refusal(manager.save, rank_state(8), step=8 + 2 * rank)
    found["fails"] = refusal(manager.save, lambda: {}["model"] if rank else rank_state(8), step=8)
    found["background"] = in_the_background(folder / "behind", rank)
    found["graph"] = continuing(folder / "graph")
    dist.barrier()
    if rank == 1:  # the file of rank 0
        file = min((folder / "steps" / "step-00000006").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        mg.CheckpointManager(folder / "of one rank", together=False).save({"x": 1}, step=0)
    dist.barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found["whole"] = manager.latest()
        found["told"] = [str(item.message) for item in told if "skipped" in str(item.message)]
    return found


def continuing(folder: Path) -> dict[str, Any]:
    """A graph of each rank that goes on after a load, with dropout and data of its own."""
    rank = dist.get_rank()

    def graph() -> mg.Graph:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        return mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))

    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(4)]
    step, manager = graph(), mg.CheckpointManager(folder)
    torch.manual_seed(rank)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(step(batch, torch.zeros(6, 2)))
        if number == 1:
            manager.save(step.state_dict, step=2)
    other = graph()
    torch.manual_seed(5)
    path = manager.latest()
    other.load_state_dict(mg.load(path, like=other.state_dict()))
    again = [other(batch, torch.zeros(6, 2)) for batch in batches[2:]]
    return {
        "losses": [torch.equal(*pair) for pair in zip(losses[2:], again, strict=True)],
        "mean": step.state_dict()["model"]["1.running_mean"],
    }


def in_the_background(folder: Path, rank: int) -> tuple[str | None, int, str]:
    """Saved beside collectives of the training; then a save that fails on one rank."""
    manager = mg.CheckpointManager(folder, asynchronous=True)
    total = 0
    state = rank_state()
    for step in range(3):
        state["step"] = step
        manager.save(state, step=step)
        state["model"]["mean"].add_(1)
        for _ in range(50):
            value = torch.ones(1)
            dist.all_reduce(value)
            total += int(value)
    manager.wait()
    there = expected(rank, 2)
    there["model"]["mean"] += 2
    equal = difference(there, mg.load(manager.latest()))
    manager.save({"f": len if rank else 1}, step=3)
    return equal, total, refusal(manager.wait)[0]


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("managed")
    return folder, on_ranks(managing, folder)


def test_the_ranks_save_steps_together(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, outcomes = managed
    for found in outcomes:
        assert found["none yet"] is None
        assert [path and path.name for path in found["paths"]] == [
            *("step-00000000", None, "step-00000002", None, "step-00000004", None, "step-00000006")
        ]
        assert found["kept"] == ["step-00000004", "step-00000006"]
        assert found["latest"] == found["again"] == folder / "steps" / "step-00000006"
        assert found["state"] is None


def test_what_is_wrong_on_one_rank_is_an_error_on_all(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, outcomes = managed
    for found in outcomes:
        assert "step 6 is not saved" in found["of another run"][0]
        assert "rewind=True" in found["of another run"][1]
        assert (
            "rank 0 is about to save step-00000008; rank 1 is about to save step-00000010"
            in found["other steps"][0]
        )
        assert "rank 1: KeyError: 'model'" in found["fails"][0]
    assert sorted(os.listdir(folder / "steps")) == ["step-00000004", "step-00000006"]


def test_all_ranks_skip_what_one_finds_damaged(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, outcomes = managed
    for found in outcomes:
        assert found["whole"] == folder / "steps" / "step-00000004"
        (told,) = found["told"]
        assert "-00000.safetensors: the tensor " in told


def test_the_ranks_save_beside_their_training(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, outcomes = managed
    for found in outcomes:
        equal, total, failed = found["background"]
        assert equal is None
        assert total == 3 * 50 * 2
        assert "rank 1: f is of type" in failed
    assert sorted(os.listdir(folder / "behind")) == [f"step-{step:08}" for step in range(3)]


def test_each_rank_goes_on_with_its_own_bits(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (found["graph"] for found in managed[1])
    assert first["losses"] == second["losses"] == [True, True]
    assert not torch.equal(first["mean"], second["mean"])


def test_a_rank_may_keep_steps_of_its_own(managed: tuple[Path, list[dict[str, Any]]]) -> None:
    assert os.listdir(managed[0] / "of one rank") == ["step-00000000"]


# --- killed while it saves -------------------------------------------------------------------------------------------


def saving_until_killed(folder: Path, killed: int, seconds: float) -> tuple[int, str]:
    """Save steps; the last one that this rank has saved, and the error that ended it."""
    rank, last = dist.get_rank(), -1
    manager = mg.CheckpointManager(folder, keep=2)
    dist.barrier()
    if rank == killed:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -9 {os.getpid()}"])
    for step in range(1000):
        state = {"step": step, "of rank": torch.full((1000,), 1000.0 * step + rank)}
        try:
            manager.save(state, step=step)
        except mg.CheckpointError as error:
            return last, error.message
        last = step
    return last, ""


def killed_while_saving(folder: Path, count: int, seed: int) -> None:
    """So many groups of two, one rank of each killed at a random moment."""
    drawn = random.Random(seed)
    while count:
        cases = [(drawn.randrange(2), drawn.uniform(0.05, 0.6)) for _ in range(min(count, 4))]
        groups = [
            Group(saving_until_killed, 2, folder / f"{count}-{number}", *case, seconds=3.0)
            for number, case in enumerate(cases)
        ]
        for number, (group, (killed, _)) in enumerate(zip(groups, cases, strict=True)):
            survivor = group.results()[1 - killed]
            assert survivor.value is not None, survivor
            last, message = survivor.value
            directory = folder / f"{count}-{number}"
            assert (
                f"rank {killed} is gone or stopped" in message or f"rank {killed} did not come" in message
            ), message
            manager = mg.CheckpointManager(directory)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # nothing is half there
                newest = manager.latest()
            assert (newest is not None) or last == -1
            if newest is not None:
                for rank in range(2):
                    found = load_checkpoint(newest, Process(rank, 2))
                    step = found["step"]
                    # the coordinator may be killed after the commit, before the other knows of it
                    assert last <= step <= last + 1
                    assert_equal({"step": step, "of rank": torch.full((1000,), 1000.0 * step + rank)}, found)
        count -= len(cases)


def test_a_rank_that_is_killed_leaves_whole_checkpoints(tmp_path: Path) -> None:
    killed_while_saving(tmp_path, 4, seed=1)


@pytest.mark.long
@pytest.mark.ranks
def test_fifty_ranks_that_are_killed_leave_whole_checkpoints(tmp_path: Path) -> None:
    killed_while_saving(tmp_path, 50, seed=2)
