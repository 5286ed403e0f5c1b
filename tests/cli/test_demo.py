"""The demo: what it counts as equal, how it deals batches, and what the command prints and returns."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from monograph.cli import demo
from monograph.cli.main import app


@dataclass(frozen=True)
class SmallImages:
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def small_images() -> SmallImages:
    x, y = torch.arange(10.0).view(10, 1), torch.arange(10) % 2
    return SmallImages(x, y, x[:4], y[:4])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_equal_trainers_agree_at_each_step() -> None:
    data = list(demo.batches(small_images(), steps=5, size=4, seed=0))
    one, other = (demo.eager_trainer(small_model(), steps=5) for _ in range(2))
    assert [report.difference for report in demo.train_both(one, other, data, seed=1)] == [None] * 5


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", ["3.weight", "1.running_mean", "optimizer state 0: momentum_buffer", "rng", "loss"]
)
def test_the_first_difference_is_named(name: str) -> None:
    data = list(demo.batches(small_images(), steps=2, size=4, seed=0))
    eager, other = (demo.eager_trainer(small_model(), steps=2) for _ in range(2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = other.step(x, y).detach()
        if name == "rng":
            torch.rand(())
        changed = {"loss": loss, **demo.state(other)}.get(name)
        if changed is not None:
            bits = changed.detach().view(torch.int32)
            bits ^= 1
        return loss

    spoiled = demo.Trainer(other.model, other.optimizer, step)
    difference = next(demo.train_both(eager, spoiled, data, seed=1)).difference
    assert difference is not None
    assert difference.startswith((f"{name}: expected", f"{name}["))


def test_batches_drop_the_rest_of_an_epoch() -> None:
    found = [x.flatten().tolist() for x, _ in demo.batches(small_images(), steps=4, size=4, seed=0)]
    assert [len(x) for x in found] == [4, 4, 4, 4]
    assert not set(found[0]) & set(found[1])
    assert found[:2] != found[2:]
    assert found == [x.flatten().tolist() for x, _ in demo.batches(small_images(), steps=4, size=4, seed=0)]


@pytest.mark.long
def test_the_command_trains_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--steps", "3", "--batch", "4"])
    assert done.exit_code == 0, done.output
    assert "3 of 3" in done.output
    assert "nodes of the program" in done.output


def test_without_scikit_learn_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "pip install scikit-learn" in done.output


def test_a_folder_without_cifar10_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "--data", str(tmp_path)])
    assert done.exit_code == 2
    assert "data_batch_1" in done.output


@pytest.mark.long
def test_the_package_does_not_import_its_command_line() -> None:
    program = "import sys, monograph; assert not {'monograph.cli.main', 'monograph.cli.demo', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
