"""The demo: what it counts as equal, how it deals batches, and what the command prints and returns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import monograph as mg
from monograph.backends import beside
from monograph.cli import demo
from monograph.cli.demo_output import DEFAULT, FASTEST, DemoRun
from monograph.cli.main import app
from monograph.internals import upgrades


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
    reports = list(demo.train_in_turn(one, {"other": other}, data, seed=1))
    assert [report.graphs["other"].difference for report in reports] == [None] * 5


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["3.weight", "1.running_mean", "optimizer state 0: exp_avg", "rng", "loss"])
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
    difference = next(demo.train_in_turn(eager, {"it": spoiled}, data, seed=1)).graphs["it"].difference
    assert difference is not None
    assert difference.startswith((f"{name}: expected", f"{name}["))


def test_batches_drop_the_rest_of_an_epoch() -> None:
    found = [x.flatten().tolist() for x, _ in demo.batches(small_images(), steps=4, size=4, seed=0)]
    assert [len(x) for x in found] == [4, 4, 4, 4]
    assert not set(found[0]) & set(found[1])
    assert found[:2] != found[2:]
    assert found == [x.flatten().tolist() for x, _ in demo.batches(small_images(), steps=4, size=4, seed=0)]


def trained(
    steps: int, make: Callable[[], nn.Module] = small_model, *, fastest_at: int | None = None
) -> DemoRun:
    """A run of the small model, with the default, and with the fastest code if it has to be there at a step."""
    eager = demo.eager_trainer(make(), steps=steps)
    graphs = {DEFAULT: demo.graph_trainer(make(), steps=steps)}
    if fastest_at is not None:
        graphs[FASTEST] = demo.graph_trainer(make(), steps=steps, swap_at=fastest_at)
    run = DemoRun(eager, graphs, small_images(), batch=4)
    run.train(demo.batches(small_images(), steps=steps, size=4, seed=0), steps, 1, Console(quiet=True))
    return run


def printed(run: DemoRun) -> str:
    """The table as text."""
    text = StringIO()
    Console(width=160, file=text).print(run.table())
    return text.getvalue()


def test_the_default_has_eagers_bits_before_and_after_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "_WORTH_IT", 1e-9)  # after the first step
    monkeypatch.setattr(upgrades.Compilation, "is_done", lambda self: True)  # what is needed is waited for
    run = trained(8)
    assert list(run.problems()) == []
    backends = [report.graphs[DEFAULT].outcome.backend for report in run.reports]
    assert (backends[0], backends[-1]) == ("aten", "exact")
    assert f"{backends.index('exact') + 1} (exact)" in printed(run)
    assert "8 of 8" in printed(run)


def test_a_default_with_other_bits_is_a_problem() -> None:
    def other() -> nn.Module:
        model = small_model()
        made.append(model)
        if len(made) == 2:  # that of the graph
            with torch.no_grad():
                model.get_parameter("3.bias")[0] += 1e-3
        return model

    made: list[nn.Module] = []
    (problem,) = trained(2, other).problems()
    assert problem.startswith(f"Step 1 of {DEFAULT} differs from eager: loss: expected")


def test_without_a_compiler_it_says_why_and_the_bits_are_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise mg.BackendError("there is no compiler")

    monkeypatch.setattr(upgrades, "_WORTH_IT", 1e-9)
    monkeypatch.setattr(upgrades, "Lowering", refused)
    monkeypatch.setattr(beside, "CompiledBeside", refused)
    run = trained(4, fastest_at=2)
    assert list(run.problems()) == []
    assert printed(run).count("4 of 4") == 2
    _, *reasons = run.words()
    assert reasons == [
        f"{name}: it goes on op by op with eager's bits, since {backend} could not be used: there is no compiler."
        for name, backend in ((DEFAULT, "exact"), (FASTEST, "inductor"))
    ]


def test_an_accuracy_is_as_good_if_the_images_cannot_tell() -> None:
    assert demo.is_as_good(0.97, 0.99, 360)
    assert demo.is_as_good(1.0, 0.99, 360)
    assert not demo.is_as_good(0.94, 0.99, 360)
    assert demo.is_as_good(0.99, 1.0, 360)
    assert not demo.is_as_good(0.97, 1.0, 360)


@pytest.mark.long
def test_the_command_trains_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--steps", "3", "--batch", "4", "--no-fastest"])
    assert done.exit_code == 0, done.output
    assert "3 of 3" in done.output
    assert "nodes of the program" in done.output
    assert "all 3 steps have eager's bits" in done.output


@pytest.mark.long
def test_the_command_goes_on_by_the_fastest_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)

    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    monkeypatch.setattr(demo, "make_model", make_model)
    done = CliRunner().invoke(app, ["demo", "--steps", "8", "--batch", "16"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "4 of 4 before the swap" in done.output
    assert "5 (inductor)" in done.output
    assert f"{FASTEST}: 4 steps have eager's bits" in done.output


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
