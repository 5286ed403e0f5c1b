"""The `auto` backend: a build goes on by compiled code between two steps, and nobody can tell but by the clock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mg
from monograph.elementwise import compiling
from monograph.internals import upgrades
from monograph.internals.internals import internals_of
from tests.backends.test_exact import OPTIMIZERS, batches, bits, both, check_same
from tests.runtime.test_interrupts import Signals

SECONDS = 120.0  # that anything may take here


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; compiled code is worth while at once."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(upgrades, "_WORTH_IT", 0.0)
    return tmp_path / "cache"


def slow_compiler(folder: Path, seconds: float = 60.0) -> str:
    """A compiler that takes its time."""
    script = folder / "slow-cc"
    script.write_text(f'#!/bin/sh\nsleep {seconds}\nexec {compiling.c_compiler()} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def upgrade_of(graph: mg.Graph) -> upgrades.ToExact:
    """How far the newest build is."""
    found = internals_of(graph).upgrades.pending[graph.builds[-1].number]
    assert isinstance(found, upgrades.ToExact)
    return found


def test_the_swap_changes_no_bit(cache: Path) -> None:
    eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
    end = time.monotonic() + SECONDS
    backends, after = [], 0
    while after < 5 and time.monotonic() < end:
        for batch in batches(5):
            assert bits(eager(*batch)) == bits(graph(*batch))
            backends.append(graph.backend)
        after += graph.backend == "exact"
    check_same(eager, graph)
    assert backends[0] == "aten"
    assert backends[-1] == "exact"
    assert len(graph.builds) == 1
    assert graph.builds[0].settings.backend == "auto"


def test_it_is_what_a_graph_begins_with() -> None:
    _eager, graph = both(OPTIMIZERS["sgd"])
    assert mg.trace(torch.relu).config.settings.backend == "auto"
    assert graph.config.settings.backend == "exact"


def test_compiled_code_in_the_cache_is_taken_at_once(cache: Path) -> None:
    _eager, graph = both(OPTIMIZERS["adamw"], backend="exact")
    graph(*batches(1)[0])
    eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
    for batch in batches(3):
        assert bits(eager(*batch)) == bits(graph(*batch))
    assert graph.backend == "exact"
    check_same(eager, graph)


def test_short_training_compiles_nothing() -> None:
    _eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
    for batch in batches(5):
        graph(*batch)
    assert upgrade_of(graph).lowering is None


def test_a_compiler_that_is_killed_is_no_harm(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", slow_compiler(tmp_path))
    eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
    for number, batch in enumerate(batches(30)):
        assert bits(eager(*batch)) == bits(graph(*batch))
        if number == 3:
            compilation = upgrade_of(graph).compilation
            assert compilation is not None
            for run in compilation._runs:
                run.kill()
                run.wait(SECONDS)
    check_same(eager, graph)
    assert graph.backend == "aten"
    assert "exact could not be used" in str(graph.explain())
    assert not list((cache / "shared").glob(".new-*"))


def test_a_graph_that_goes_ends_its_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", slow_compiler(tmp_path))
    _eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
    for batch in batches(3):
        graph(*batch)
    compilation = upgrade_of(graph).compilation
    assert compilation is not None
    runs = compilation._runs
    assert all(run.poll() is None for run in runs)
    compilation._end()
    assert all(run.poll() is not None for run in runs)
    assert not list((cache / "shared").glob(".new-*"))


SCRIPT = """
import os, sys, torch, monograph as mg
from monograph.internals import upgrades
upgrades._WORTH_IT = 0.0
model = torch.nn.Linear(4, 3)
graph = mg.train_graph(model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters()))
for _ in range(3):
    graph(torch.randn(2, 4), torch.randn(2, 3))
(found,) = graph._monograph.upgrades.pending.values()
print(*[run.pid for run in found.compilation._runs], flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", marks=pytest.mark.long),
        pytest.param("raise RuntimeError", marks=pytest.mark.long),
        pytest.param("raise KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param("sys.exit(3)", marks=pytest.mark.long),
        "if os.fork() == 0: [graph(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(20)]",
    ],
    ids=["end", "error", "interrupt", "exit", "fork"],
)
def test_no_process_is_left_behind(cache: Path, tmp_path: Path, end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        env=os.environ | {"CC": slow_compiler(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    pids = [int(item) for item in ran.stdout.split()]
    assert pids
    for pid in pids:
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}")
    assert "Error in" not in ran.stderr


@pytest.mark.long
def test_a_broken_entry_of_the_cache_is_made_again_with_one_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _eager, graph = both(OPTIMIZERS["adamw"], backend="exact")
    graph(*batches(1)[0])
    for library in (cache / "shared").glob("*/loops.so"):
        half = library.read_bytes()[:100]
        library.unlink()  # it may be loaded
        library.write_bytes(half)
    eager, graph = both(OPTIMIZERS["adamw"], backend="exact")
    for batch in batches(2):
        assert bits(eager(*batch)) == bits(graph(*batch))
    assert graph.backend == "exact"
    assert caplog.text.count("is broken") == 1


@pytest.mark.one_case
@pytest.mark.parametrize("first", range(4))
def test_an_interrupt_at_each_line_of_the_swap_leaves_one_that_is_made_later(
    cache: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    files = (upgrades.__file__, compiling.__file__)
    functions = ("next_build", "successor", "finish", "_waits_for", "_keep")

    monkeypatch.setattr(compiling, "missing", list)
    monkeypatch.setattr(upgrades, "missing", list)
    (batch,) = batches(1)

    def ready() -> tuple[Any, mg.Graph]:
        """At a swap that has nothing to do but to take what was compiled."""
        eager, graph = both(OPTIMIZERS["sgd"], backend="auto")
        while True:
            eager(*batch)
            graph(*batch)
            upgrade = upgrade_of(graph)
            assert upgrade.compilation is not None
            for run in upgrade.compilation._runs:
                run.wait(SECONDS)
            if upgrade._is_tried:
                return eager, graph

    _eager, graph = ready()
    with Signals(files, functions) as noted:
        graph(*batch)
    assert graph.backend == "exact"
    assert len(noted.lines) > 20
    for line in list(noted.lines)[first::4]:
        eager, graph = ready()
        before = internals_of(graph).store.steps
        with suppress(KeyboardInterrupt), Signals(files, functions, line):
            graph(*batch)
        while internals_of(graph).store.steps < before + 2:
            graph(*batch)
        eager(*batch)
        eager(*batch)
        check_same(eager, graph)
        assert graph.backend == "exact", line
