"""Who waits for a compilation is told what it does: a line in a terminal, log records elsewhere, nothing if it is short."""

from __future__ import annotations

import io
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.inspect.printed import waiting
from tests.support import new_cache


class Step(mg.Graph):
    def __init__(self, backend: str = "aten") -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))
        self.config.backend(backend)  # type: ignore[arg-type]

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_PATIENCE", "_LINES", "_RECORDS"):
        monkeypatch.setattr(waiting, name, 0.0 if name != "_LINES" else 0.01)
    monkeypatch.delenv("MONOGRAPH_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "monograph progress"]


def is_aloud(record: logging.LogRecord) -> bool:
    return record.name == "monograph.progress" and record.levelno == logging.WARNING


def told(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [
        record for record in caplog.records if record.name == "monograph.progress" and not is_aloud(record)
    ]
    assert {record.levelno for record in found} <= {level}
    return [record.getMessage() for record in found]


@pytest.mark.usefixtures("impatient")
def test_a_log_has_what_is_done_and_how_far(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "monograph.progress")
    step = Step()
    step(torch.ones(2, 3))
    lines = told(caplog)
    assert all(line.startswith(f"{step.name}: ") and line.endswith(" s") for line in lines)
    assert any("capture, " in line and "ops, in model.1" in line for line in lines)
    assert any(": plan" in line for line in lines)


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_the_compiler_is_watched_while_it_works(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    caplog.set_level(logging.INFO, "monograph.progress")
    Step("inductor")(torch.ones(2, 3))
    lines = told(caplog)
    for detail in ("choosing kernels", "writing C++ for", "g++ is at file 1"):
        assert any(f"backend inductor, {detail}" in line for line in lines), detail


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("stage", "times", "hint"),
    [
        ("backend exact", 1, '; config.backend("auto") trains meanwhile'),
        ("backend inductor", 1, "; background=True in config.backend() trains meanwhile"),
        ("backend aten", 0, ""),
        ("capture", 0, ""),
    ],
)
def test_a_long_compilation_is_a_warning_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stage: str, times: int, hint: str
) -> None:
    monkeypatch.setattr(waiting, "_LONG", 0.0)
    observer = waiting.Waiting("Step_0")
    with observer.stage(stage):
        for detail in ("file 1", "file 2"):
            observer.progress(detail)
    found = [record.getMessage() for record in caplog.records if is_aloud(record)]
    assert len(found) == times
    assert all("Step_0: the step has waited" in line and hint in line for line in found)


@pytest.mark.usefixtures("impatient")
def test_a_later_build_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LONG", 0.0)
    with waiting.Waiting("Step_0", 2).stage("backend inductor"):
        pass
    assert [
        record.getMessage().startswith("Step_0: build 2: the step has waited") for record in caplog.records
    ] == [True]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("impatient")
@pytest.mark.every_case
@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_has_one_line_that_goes_again(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    caplog.set_level(logging.INFO, "monograph.progress")
    step = Step()
    if fails:
        with pytest.raises(mg.CaptureError):
            step(torch.ones(2, 5))
    else:
        step(torch.ones(2, 3))
    written = terminal.getvalue()
    assert f"\r\x1b[K{step.name}: capture, " in written
    assert "\n" not in written
    assert written.endswith("\r\x1b[K")
    assert told(caplog) == []  # no record beside the line


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["notebook", "editor", "file"])
def test_a_cell_and_a_file_have_no_line_that_would_go_again(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream: io.StringIO = io.StringIO() if where == "file" else Terminal()
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    elif where == "editor":
        monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", stream)
    caplog.set_level(logging.INFO, "monograph.progress")
    Step()(torch.ones(2, 3))
    assert stream.getvalue() == ""
    assert told(caplog)


@pytest.mark.usefixtures("impatient")
def test_nothing_is_told_when_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONOGRAPH_PROGRESS", "0")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    caplog.set_level(logging.DEBUG, "monograph.progress")
    Step()(torch.ones(2, 3))
    assert terminal.getvalue() == ""
    assert told(caplog) == []


def test_short_waits_are_not_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_PATIENCE", 1000.0)
    caplog.set_level(logging.DEBUG, "monograph.progress")
    Step()(torch.ones(2, 3))
    assert told(caplog) == []


@pytest.mark.usefixtures("impatient")
def test_a_capture_has_no_thread_beside_it() -> None:
    """Where there are other threads, a capture takes what changes in objects for theirs."""
    seen: list[int] = []

    class Looking(Step):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(threading.active_count())
            return super().build(x)

    before = threading.active_count()
    Looking()(torch.ones(2, 3))
    assert set(seen) == {before}
