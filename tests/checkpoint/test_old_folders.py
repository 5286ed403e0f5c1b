"""A fresh run beside the checkpoints of another one is told at its first step, not at its first save."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


def step_of() -> mg.Graph:
    model = nn.Linear(3, 2)
    return mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a checkpoint of step 1 of a run that has ended."""
    step = step_of()
    step(X, Y)
    mg.CheckpointManager(tmp_path / "run").save(step.state_dict(), step=1)
    return tmp_path / "run"


def test_a_fresh_run_is_told_at_its_first_step(folder: Path) -> None:
    checkpoints, step = mg.CheckpointManager(folder), step_of()
    with pytest.warns(UserWarning, match=r"first step, and .* holds step-00000001 of another run") as told:
        step(X, Y)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X, Y)  # once is enough
    with pytest.raises(mg.CheckpointError, match="of another run"):
        checkpoints.save(step.state_dict(), step=1)


def test_others_are_not_told(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = mg.CheckpointManager(folder)
        kept.latest()
        step_of()(X, Y)  # somebody knows of the checkpoint
        resumed, other = step_of(), mg.CheckpointManager(folder)
        resumed.load_state_dict(mg.load(folder / "step-00000001"))
        resumed(X, Y)
        mg.trace(lambda x: x * 2)(X)  # it trains nothing
        del other
        rewinding = mg.CheckpointManager(folder, rewind=True)
        step_of()(X, Y)
        new = mg.CheckpointManager(folder.parent / "new")
        step_of()(X, Y)
    assert new.latest() is None
    assert rewinding.rewind


OLD_RUN = """
import sys, torch, monograph as mg
checkpoints = mg.CheckpointManager(sys.argv[1])
for step in (2, 4, 6):
    checkpoints.save({"weight": torch.zeros(2) + step}, step=step)
"""


@pytest.mark.parametrize("goes_on", [False, True])
def test_checkpoints_of_another_run_stay_unless_this_one_goes_on_from_them(
    tmp_path: Path, goes_on: bool
) -> None:
    subprocess.run([sys.executable, "-c", OLD_RUN, str(tmp_path)], check=True)
    checkpoints = mg.CheckpointManager(tmp_path, keep=2)
    if goes_on:
        assert checkpoints.latest() == tmp_path / "step-00000006"
    for step in (10, 20, 30):
        checkpoints.save({"weight": torch.zeros(2)}, step=step)
    left = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert left == ([20, 30] if goes_on else [2, 4, 6, 20, 30])
