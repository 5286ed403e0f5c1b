"""The run: workers, what is excluded, and what the command leaves behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

import monograph as mg
from benchmarks import machine, peers
from benchmarks.client import Client, Home, WorkerError, pinned
from benchmarks.job import Job
from benchmarks.peers import REFERENCE, all_peers
from benchmarks.record import Memory, Prepared, Result, Round
from benchmarks.run import Contender, Options, WorkloadRun, losses_differ, movement_differs
from benchmarks.run import run as run_all
from benchmarks.setting import Setting
from benchmarks.stored import read_report, write_report
from benchmarks.worker import Worker
from benchmarks.workloads import all_workloads
from monograph.cli.main import app
from tests.benchmarks.reports import measured, result
from tests.support import ROOT

WORKLOAD = all_workloads(smoke=True)["mlp64"]


def options(*names: str) -> Options:
    """A small run of some peers."""
    chosen = tuple(all_peers()[name] for name in names)
    return Options((WORKLOAD,), chosen, rounds=1, threads=1, smoke=True)


def test_losses_must_agree() -> None:
    assert losses_differ((1.0, 2.0), (1.0005, 2.001)) is None
    assert losses_differ((1.0, 2.0), (1.0, 2.01)) == "losses 1, 2 differ from eager's 1, 2.01"
    assert losses_differ((float("nan"),), (1.0,)) is not None


def test_parameters_must_move_as_in_eager_mode() -> None:
    expected = {"weight": 1.0, "bias": 1e-9}
    assert movement_differs({"weight": 1.05, "bias": 3e-9}, expected) is None
    assert movement_differs({"weight": 0.0, "bias": 1e-9}, expected) == (
        "weight moved by 0 in the first steps, and by 1 in eager mode"
    )
    assert movement_differs({"weight": 1.0, "bias": 0.3}, expected) is not None
    assert movement_differs({"weight": math.nan, "bias": 0.0}, expected) is not None


@pytest.mark.long
def test_a_peer_with_other_losses_is_excluded(tmp_path: Path) -> None:
    said: list[str] = []
    run = WorkloadRun(options("eager"), WORKLOAD, Home(tmp_path), said.append)
    contender = run.contender(all_peers()["eager"], Prepared((9.0, 9.0, 9.0), {}, 0.1, 0.0, 0.1))
    assert contender.client is None
    assert contender.measured.error is not None
    assert contender.measured.error.endswith("differ from eager's 9, 9, 9")
    assert "failed" in said[0]


class Noted:
    """A worker that notes when it is asked for a turn, and dies at a given one."""

    def __init__(self, name: str, order: list[str], last: int = 100) -> None:
        self.name, self.order, self.last = name, order, last
        self.job = Job("mlp64", "eager", Setting(), threads=1, smoke=True)
        self.cache = Path("where it keeps what it has compiled")

    def round(self, steps: int) -> Round:
        """A step takes a millisecond."""
        if self.order.count(self.name) == self.last:
            raise WorkerError("gone")
        self.order.append(self.name)
        return Round(steps, steps * 1e-3, steps * 2e-3, 5e-4)

    def memory(self) -> Memory:
        """None worth mentioning."""
        return Memory(0, 0, 0)

    def close(self) -> None:
        """End it."""
        self.order.append(f"{self.name} is closed")


def test_a_round_is_many_short_turns_of_all(tmp_path: Path) -> None:
    order: list[str] = []
    run = WorkloadRun(
        replace(options("eager"), rounds=2, smoke=False), WORKLOAD, Home(tmp_path), lambda text: None
    )
    turns = run.options.turns
    contenders = [
        Contender(replace(made, rounds=()), Noted(name, order, last))  # type: ignore[arg-type]
        for name, last in (("a", 100), ("b", turns + 1))
        for made in [measured(name, 1.0)]
    ]
    first, second = run.measure(contenders)
    assert turns > 1
    assert order == ["a", "b"] * (turns + 1) + ["a"] * (turns - 1)
    assert [len(first.rounds), len(second.rounds)] == [2, 1]
    assert second.error == "gone"
    steps = run.num_steps(contenders[0].measured.chosen) * turns  # type: ignore[arg-type]
    assert first.rounds[0].steps == steps
    assert first.rounds[0].wall_seconds == pytest.approx(steps * 1e-3)
    assert first.rounds[0].fastest_seconds == 5e-4


def test_a_missing_library_is_told_and_no_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    run = WorkloadRun(options("jax"), WORKLOAD, Home(tmp_path), lambda words: None)
    contender = run.contender(all_peers()["jax"], Prepared((1.0, 1.0, 1.0), {}, 0.1, 0.0, 0.1))
    assert contender.measured.error == "jax and optax not installed: pip install 'monograph[bench]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_jax_is_imported_by_nobody_else() -> None:
    code = "import sys, monograph.cli.main, benchmarks.worker; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.long
def test_a_worker_steps_and_tells_its_times(tmp_path: Path) -> None:
    client = Client(Job("mlp64", REFERENCE, Setting(), threads=1, smoke=True), Home(tmp_path))
    try:
        prepared = client.prepare()
        assert len(prepared.losses) == 3
        assert prepared.first_step_seconds >= prepared.step_seconds > 0
        taken = client.round(7)
        assert taken.steps == 7
        assert taken.wall_seconds >= taken.fastest_seconds > 0
        assert client.flops() > 0
        assert client.memory().peak_bytes >= client.memory().step_bytes >= 0
        assert set(client.gemm()) <= {"torch.mm", "oneDNN"}
    finally:
        client.close()
    assert client.process.returncode == 0


def test_a_second_process_finds_the_caches_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WorkloadRun(options("eager"), WORKLOAD, Home(tmp_path), lambda words: None)
    order: list[str] = []

    class Second(Noted):
        """The worker that is started then."""

        def __init__(self, job: Job, home: Home) -> None:
            super().__init__("second", order)
            assert (job, home.shared_cache) == (first.job, first.cache)

        def prepare(self) -> Prepared:
            order.append("prepared")
            return Prepared((1.0,), {}, 0.5, 0.0, 0.1)

    first = Noted("first", order)
    monkeypatch.setattr(sys.modules[WorkloadRun.__module__], "Client", Second)
    found = run.with_warm(measured("eager", 1.0), Contender(measured("eager", 1.0), first))  # type: ignore[arg-type]
    assert found.warm is not None
    assert found.warm.first_step_seconds == 0.5
    assert order == ["first is closed", "prepared", "second is closed"]


def test_auto_is_measured_as_training_goes() -> None:
    worker = Worker(Job("mlp64", "monograph-auto", Setting(), threads=1, smoke=True))
    assert worker.prepare().capture_seconds is not None
    assert worker.competitor is not None
    graph, end = worker.competitor.step, time.monotonic() + 60
    assert isinstance(graph, mg.Graph)
    assert graph.backend == "aten"
    while graph.backend != "exact":
        worker.round(100)
        assert time.monotonic() < end


@pytest.mark.long
def test_a_worker_finds_the_modules_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that stands: what lies there may have the same names."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("benchmarks", "monograph"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    client = Client(Job("mlp64", "monograph-aten", Setting(), threads=1, smoke=True), Home(tmp_path))
    try:
        assert len(client.prepare().losses) == 3
    finally:
        client.close()


@pytest.mark.long
def test_a_worker_that_ends_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    client = Client(Job("no such workload", REFERENCE, Setting(), threads=1, smoke=True), Home(tmp_path))
    with pytest.raises(WorkerError, match="ended with status 1: KeyError: 'no such workload'"):
        client.prepare()
    client.close()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no processes")
def test_pinning_ends() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.long
def test_the_command_writes_all_it_found(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"report.{name}" for name in ("json", "svg", "md")}
    names = ["eager", "monograph-aten", "monograph-auto"]
    command = ["bench", "--smoke", "--workload", "mlp64"]
    command += [word for name in names for word in ("--peer", name)]
    command += ["--threads", "1", "--json", str(paths["json"]), "--chart", str(paths["svg"])]
    done = CliRunner().invoke(app, [*command, "--markdown", str(paths["md"])])
    assert done.exit_code == 0, done.output
    report = json.loads(paths["json"].read_text())
    (result,) = report["results"]
    assert [one["peer"] for one in result["measured"]] == names
    for one in result["measured"]:
        assert one["error"] is None
        assert one["chosen"]["setting"] == "fused"
        assert len(one["rounds"]) == 1
        assert one["warm"]["losses"] == one["chosen"]["prepared"]["losses"] == result["losses"]
        for prepared in (one["chosen"]["prepared"], one["warm"]):
            seconds = prepared["capture_seconds"]
            assert seconds is None if one["peer"] == "eager" else 0 < seconds < prepared["first_step_seconds"]
    assert report["machine"]["threads"] == 1
    for name in names:
        assert name in paths["svg"].read_text()
        assert name in paths["md"].read_text()
    assert "mlp64: eager [fused] first step" in done.output
    assert "mlp64: monograph-auto [fused] first step of a second process" in done.output
    assert "Settings tried" in done.output
    (heads,) = [line for line in done.output.splitlines() if "first step s" in line]  # in one line each
    assert "compile s" in heads


class Quick(WorkloadRun):
    """Measures nothing; each result is another one."""

    milliseconds = count(1)

    def result(self) -> Result:
        return result(measured("eager", float(next(self.milliseconds))), name=self.workload.name)


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[WorkloadRun.__module__]
    monkeypatch.setattr(module, "WorkloadRun", Quick)
    monkeypatch.setattr(module, "measure_gemm", lambda *_: {"torch": 1e11})
    run, path = replace(options("eager"), command="monograph bench"), tmp_path / "report.json"
    (first,) = run_all(run, lambda text: None)
    write_report(first, path)
    said: list[str] = []
    more = replace(run, workloads=(WORKLOAD, all_workloads(smoke=True)["dlrm"]))
    kept, both = run_all(more, said.append, read_report(path))
    assert kept == first
    assert both.results[0] == first.results[0]
    assert [result.workload for result in both.results] == ["mlp64", "dlrm"]
    assert len(both.dates) == 2
    assert said[0] == "Kept from before: mlp64."
    assert list(run_all(more, said.append, both)) == [both]  # nothing is left to do

    for other in (replace(run, command="monograph bench --quick"), replace(run, threads=2)):
        assert list(run_all(replace(other, workloads=()), said.append, both)) == []
        assert "measured anew" in said[-1]
    monkeypatch.setattr(machine, "sources", lambda: "others")
    (anew,) = run_all(run, said.append, first)
    assert "measured anew" in said[-1]
    assert len(anew.dates) == 1
    assert anew.results != first.results


def test_going_on_needs_a_file() -> None:
    done = CliRunner().invoke(app, ["bench", "--resume"])
    assert done.exit_code == 2
    assert "name one" in done.output


def test_names_that_do_not_exist() -> None:
    done = CliRunner().invoke(app, ["bench", "--workload", "mlp65"])
    assert done.exit_code == 2
    assert "There is no workload 'mlp65': choose from mlp64, mlp256" in done.output
