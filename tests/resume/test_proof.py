"""The proof of resuming: it holds for what is right, names what is not, and says what it cannot run."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import monograph as mg
from monograph.cli.main import app
from monograph.numerics.judge import digests
from monograph.resume.__main__ import run
from monograph.resume.factory import factory_name, load_factory
from monograph.resume.proof import Job, ResumeReport, Trail, _differences
from tests.resume import factories
from tests.support import ROOT, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata


def in_this_process(
    factory: Any, folder: Path, *, start: str | None = None, steps: int = 3, python_random: bool = False
) -> list[str]:
    """The differences, without new processes."""
    first = Job(
        factory_name(factory), "", start, 0, steps, str(folder / "middle"), 2, python_random, (1, 1), ()
    )
    trails = []
    for job in (first, replace(first, load=first.save, skip=steps, steps=0, save=None)):
        torch.manual_seed(0)
        factories.CALLS = 0
        trails.append(Trail(**run(job)))
    return _differences(*trails, first=steps + 1)


@pytest.mark.one_case
@pytest.mark.parametrize("factory", [factories.right, factories.with_loader])
def test_what_is_right_has_no_differences(factory: Any, tmp_path: Path) -> None:
    assert in_this_process(factory, tmp_path, steps=5) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("python_random", "numbers of random are drawn between the steps"),
        ("recording", "a step changes graph.seen"),
        ("global_counter", ""),
    ],
)
def test_what_the_checkpoint_does_not_hold_is_named(name: str, expected: str, tmp_path: Path) -> None:
    job = Job(
        f"tests.resume.factories:{name}", "", None, 0, 3, str(tmp_path / "middle"), 2, False, (1, 1), ()
    )
    notes = run(job)["notes"]
    assert [expected in note for note in notes] == [True] * bool(expected), notes


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["unregistered_loader", "global_counter", "python_random"])
def test_a_flaw_is_named(name: str, tmp_path: Path) -> None:
    found = in_this_process(getattr(factories, name), tmp_path)
    assert found[:2] == ["step 4: result/loss", "step 5: result/loss"]
    assert "optimizer.0/state/0/exp_avg" in found
    assert "graph.steps" not in found


def test_python_random_numbers_may_belong_to_the_state(tmp_path: Path) -> None:
    assert in_this_process(factories.python_random, tmp_path, python_random=True) == []


def test_python_random_numbers_belong_to_the_state_if_they_did_at_the_start(tmp_path: Path) -> None:
    graph, batches = factories.python_random()
    graph(batches[0])
    start = mg.save(graph.state_dict(python_random=True), tmp_path / "start")
    assert in_this_process(factories.python_random, tmp_path, start=str(start)) == []


def test_a_graph_proves_its_resumption_in_new_processes() -> None:
    torch.manual_seed(3)
    graph, batches = factories.with_loader()
    for x, _ in zip(batches, range(3), strict=False):
        graph(x)
    before = torch.get_rng_state()
    report = graph.prove_resume(factories.with_loader, steps=3, more=2)
    assert report.ok, str(report)
    assert str(report).startswith("resume proven: from the checkpoint after 3 steps the next 2 steps")
    assert_same(before, torch.get_rng_state())
    assert report.entries > 20


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from monograph.cli.main import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_the_command_proves_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    factory = f"{ROOT / 'tests' / 'resume' / 'factories.py'}:right"
    done = command("verify", "--resume", "made", factory, "--more", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resume proven" in done.stdout
    assert mg.load(tmp_path / "made")["graph.steps"] == 3


@pytest.mark.long
def test_the_command_names_the_first_differences(tmp_path: Path) -> None:
    graph, _ = factories.unregistered_loader()
    mg.save(graph.state_dict(), tmp_path / "start")
    manifest = {path.name: path.read_bytes() for path in (tmp_path / "start").iterdir()}
    factory, start = "tests.resume.factories:unregistered_loader", str(tmp_path / "start")
    done = CliRunner().invoke(app, ["verify", "--resume", start, factory, "--steps", "2"])
    assert done.exit_code == 1, done.output
    told = [line.strip() for line in done.output.splitlines() if line.startswith("  ")]
    assert told[:2] == ["step 3: batch", "step 3: result/loss"]
    assert "register_state" in done.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "start").iterdir()} == manifest


# --- what cannot be run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--resume", "x", "nothing"], "'nothing' names no factory"),
        (["--resume", "x", "--steps", "0", "a:b"], "--steps"),
        (["a:b"], "there is no module a"),
    ],
)
def test_usage_errors_end_with_status_2(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.long
def test_a_checkpoint_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "start").write_text("nothing")
    name = ["tests.resume.factories:right", "--resume", str(tmp_path / "start")]
    done = CliRunner().invoke(app, ["verify", *name])
    assert done.exit_code == 2
    assert "trains without a break failed: cannot load" in done.output


@pytest.mark.long
def test_a_factory_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", f"{tmp_path}/a.py:make", "--resume", str(tmp_path / "x")])
    assert (done.exit_code, done.output) == (2, f"there is no file {tmp_path}/a.py\n")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tests.resume.factories:nothing", "there is no function nothing in tests.resume.factories"),
        ("tests.nowhere:right", "there is no module tests.nowhere"),
        ("nowhere.py:right", "there is no file"),
        ("tests.resume.factories:no_graph", "returns a list and not a graph with its batches"),
        ("tests.resume.factories:three", "returns a tuple and not a graph with its batches: it has 3 items"),
        ("tests.resume.factories:no_batches", "are at their end"),
    ],
)
def test_what_is_no_factory(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(mg.DefinitionError, match=re.escape(told)):
        run(Job(factory_name(name), "", None, 0, 3, str(tmp_path / "middle"), 2, False, (1, 1), ()))


def test_a_script_without_the_function_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text("raise SystemExit('it has run')\n")
    done = CliRunner().invoke(app, ["verify", f"{tmp_path}/training.py:make"])
    assert (done.exit_code, done.output) == (2, f"there is no function make in {tmp_path}/training.py\n")


@pytest.mark.long
def test_an_error_in_the_other_process_is_shown() -> None:
    graph, _ = factories.right()
    with pytest.raises(mg.CheckpointError, match=r"(?s)trains without a break failed.*the data is gone"):
        graph.prove_resume(factories.failing)


@pytest.mark.every_case
@pytest.mark.parametrize("factory", [lambda: None, factories.Train().build, 3, "a:", ":b", "a"])
def test_a_factory_that_no_other_process_finds(factory: Any) -> None:
    with pytest.raises(mg.DefinitionError, match=r"factory|another process"):
        factory_name(factory)


def test_a_factory_of_a_script_is_addressed_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from monograph.resume.factory import factory_name\n"
        "def make(): ...\n"
        "if __name__ == '__main__': print(factory_name(make))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{script}:make"
    assert load_factory(done.stdout.strip())() is None


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = factory_name("script.py:make")
    assert name == factory_name("./script.py:make") == f"{tmp_path}/script.py:make"


def test_a_report_tells_the_first_ten() -> None:
    report = ResumeReport(
        2, 3, 40, tuple(f"entry {number}" for number in range(12)), batches_registered=False
    )
    text = str(report)
    assert "after 2 steps training goes another way, 12 differences" in text
    assert "entry 9\n  and 2 more\n  hint: " in text


def test_a_report_says_that_batches_were_skipped() -> None:
    assert "skipped 2; your script has to do the same" in str(
        ResumeReport(2, 3, 40, (), batches_registered=False)
    )
    assert "skipped" not in str(ResumeReport(2, 3, 40, ()))


def test_digests_are_of_bits() -> None:
    same = [
        torch.zeros(2),
        -torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, 2),
        0,
        0.0,
        -0.0,
        False,
        None,
    ]
    kinds = [*same, "0", b"0", [], {}, np.zeros(2, np.float32), np.float32(0), {0}, torch.float32]
    found = [digests(item)[""] for item in kinds]
    assert len(set(found)) == len(found)
    assert found == [digests(item)[""] for item in copy.deepcopy(kinds)]
    nan = torch.tensor([float("nan")], dtype=torch.bfloat16)
    assert digests(nan) == digests(nan.clone())
    assert digests(torch.eye(3).t()[:, 1:]) == digests(torch.eye(3)[:, 1:].contiguous())
    assert list(digests({"a": [1, {"b": 2}], "c": ()})) == ["a/0", "a/1/b", "c"]
