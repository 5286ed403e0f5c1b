"""The manager: which steps are saved, which are kept, which is the newest whole one, and writing in the background."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from monograph.checkpoint.files import opened_to_write
from monograph.checkpoint.steps import manager as manager_module
from monograph.checkpoint.write import write
from tests.checkpoint.same import assert_equal


def names(directory) -> list[str]:
    return sorted(os.listdir(directory))


def state(step: int):
    return {"step": step, "x": torch.full((50,), step)}


@pytest.fixture
def gate(monkeypatch):
    """Holds writes back until it is set."""
    event, write = threading.Event(), manager_module.write

    def wait_and_write(*args, **options):
        event.wait(30)
        return write(*args, **options)

    monkeypatch.setattr(manager_module, "write", wait_and_write)
    yield event
    event.set()


def test_the_newest_are_kept(tmp_path):
    manager = mg.CheckpointManager(tmp_path / "runs", keep=2)
    assert manager.latest() is None
    for step in (1, 2, 3, 10_000_000, 123_456_789):
        path = manager.save(state(step), step=step)
        assert path == tmp_path / "runs" / f"step-{step:08}"
        assert manager.latest() == path
    assert names(tmp_path / "runs") == ["step-10000000", "step-123456789"]
    assert_equal(state(123_456_789), mg.load(path))


def test_keep_all_and_keep_one(tmp_path):
    for step in range(5):
        mg.CheckpointManager(tmp_path / "all", keep=None).save(state(step), step=step)
        mg.CheckpointManager(tmp_path / "one", keep=1).save(state(step), step=step)
    assert len(names(tmp_path / "all")) == 5
    assert names(tmp_path / "one") == ["step-00000004"]


def test_every(tmp_path):
    called = []

    def make(step):
        called.append(step)
        return state(step)

    manager = mg.CheckpointManager(tmp_path, keep=None, every=3)
    paths = [manager.save(lambda step=step: make(step), step=step) for step in range(8)]
    assert called == [0, 3, 6]
    assert [path is not None for path in paths] == [True, False, False, True, False, False, True, False]
    assert names(tmp_path) == ["step-00000000", "step-00000003", "step-00000006"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0: at least one must be kept"),
        ({"every": 0}, "every=0: a number of steps is at least 1"),
    ],
)
def test_wrong_numbers(options, message, tmp_path):
    with pytest.raises(mg.CheckpointError, match=message):
        mg.CheckpointManager(tmp_path, **options)
    for step in (-1, True, 1.0, "1", None):
        with pytest.raises(mg.CheckpointError, match="is no number of a step"):
            mg.CheckpointManager(tmp_path).save(state(1), step=step)
    assert (
        repr(mg.CheckpointManager("a", 2)) == "CheckpointManager('a', keep=2, every=None, asynchronous=False)"
    )


def test_latest_skips_what_is_damaged_and_says_so(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=None)
    paths = [manager.save(state(step), step=step) for step in range(5)]
    (paths[4] / "manifest.json").unlink()
    file = next(paths[3].glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    (paths[2] / "mine.txt").touch()
    with pytest.warns(UserWarning, match="skipped: cannot load") as caught:
        assert manager.latest() == paths[1]
    reasons = ("it has no manifest.json", "its SHA-256 does not match", "'mine.txt', which is no part of it")
    assert len(caught) == 3
    for warning, path, reason in zip(caught, reversed(paths), reasons, strict=False):
        assert f'skipped: cannot load "{path}"' in str(warning.message)
        assert reason in str(warning.message)
        assert warning.filename == __file__


def test_damaged_ones_do_not_count_and_stay(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=2)
    first, second = (manager.save(state(step), step=step) for step in (1, 2))
    (second / "manifest.json").unlink()
    third = manager.save(state(3), step=3)
    assert names(tmp_path) == [first.name, second.name, third.name]
    manager.save(state(4), step=4)
    assert names(tmp_path) == [second.name, third.name, "step-00000004"]


def test_a_step_saved_again_is_replaced(tmp_path):
    manager = mg.CheckpointManager(tmp_path)
    path = manager.save(state(1), step=1)
    (path / "manifest.json").write_bytes(b"nonsense")
    assert manager.save({"again": 1}, step=1) == path
    assert mg.load(path) == {"again": 1}
    assert len(names(path)) == 1


def test_the_one_just_written_stays_when_training_went_back(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 5):
        path = manager.save(state(step), step=step)
    assert path.exists()
    assert names(tmp_path) == ["step-00000005", "step-00000020"]


def test_foreign_files_stay_and_killed_savers_leftovers_go(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=1)
    kept = ["notes.txt", "step-x", "step-1", "step-000000003", "best", ".step-00000001.tmp-0123abcd"]
    for name in kept[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".other.tmp-0123abcd").mkdir()
    left = tmp_path / ".step-00000007.tmp-0123abcd"
    left.mkdir()
    (left / "tensors-0123abcd-00000.safetensors").touch()
    (tmp_path / ".step-00000008.tmp-0123abcd").mkdir()
    busy = tmp_path / ".step-00000009.tmp-0123abcd"
    busy.mkdir()
    with opened_to_write(busy):
        for step in range(3):
            manager.save(state(step), step=step)
    assert names(tmp_path) == sorted([*kept, ".other.tmp-0123abcd", busy.name, "step-00000002"])
    manager.save(state(3), step=3)
    assert not busy.exists()


def test_a_failed_save_removes_no_old_one(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path, keep=1)
    path = manager.save(state(1), step=1)

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(mg.CheckpointError, match=r"step-00000002.*No space left on device"):
        manager.save(state(2), step=2)
    assert names(tmp_path) == [path.name]
    assert manager.latest() == path


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path, keep=1)
    manager.save(state(1), step=1)
    rename = os.rename

    def deny(source, target, **options):
        if "step-00000001" in str(source):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(source, target, **options)

    monkeypatch.setattr("os.rename", deny)
    with pytest.warns(UserWarning, match="cannot remove the old checkpoint .*step-00000001.*not permitted"):
        path = manager.save(state(2), step=2)
    assert manager.latest() == path


# --- in the background -----------------------------------------------------------------------------------------


def test_the_background_writes_what_was_there_at_the_call(tmp_path, gate):
    layer = nn.Linear(3, 3)
    weight, transposed, sliced = layer.weight.detach(), torch.ones(3, 4).t(), torch.ones(4, 4)[:, 1]
    live = {
        "weight": layer.weight,
        "tied": weight,
        "t": transposed,
        "slice": sliced,
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "array": np.ones(3),
        "list": [1, 2],
        "empty": torch.empty(0),
    }
    expected = {**live, "weight": weight.clone(), "tied": weight.clone(), "t": transposed.t().clone().t()}
    expected |= {"slice": sliced.clone(), "array": live["array"].copy(), "list": [1, 2]}
    manager = mg.CheckpointManager(tmp_path, asynchronous=True)
    path = manager.save(live, step=1)
    assert not path.exists()
    with torch.no_grad():
        for tensor in (layer.weight, transposed, sliced):
            tensor.zero_()
    live["array"][:] = 0
    live["list"].append(3)
    gate.set()
    manager.wait()
    loaded = mg.load(path)
    assert_equal(expected, loaded)
    assert loaded["weight"] is loaded["tied"]


def test_a_save_never_waits_for_an_earlier_one(tmp_path, gate):
    """One is written, one waits; the newest takes the place of what waits."""
    manager = mg.CheckpointManager(tmp_path, keep=None, asynchronous=True)
    manager.save(state(1), step=1)
    manager.save(state(2), step=2)
    with pytest.warns(UserWarning, match="step-00000002.*is left out"):
        manager.save(state(3), step=3)
    assert names(tmp_path) == []
    gate.set()
    manager.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert_equal(state(3), mg.load(tmp_path / "step-00000003"))
    manager.save(state(4), step=4)
    manager.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def failing(monkeypatch):
    def full(_fd, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)


def test_the_error_of_a_background_save_is_seen(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path, asynchronous=True)
    with monkeypatch.context() as patch:
        failing(patch)
        manager.save(state(1), step=1)
        with pytest.raises(mg.CheckpointError, match=r"step-00000001.*No space left on device"):
            manager.wait()
        manager.wait()  # told once
        manager.save(state(2), step=2)
        while manager._thread is not None:  # until it has failed
            time.sleep(0.001)
        with pytest.raises(mg.CheckpointError, match="step-00000002"):
            manager.save(state(3), step=3)
    manager.save(state(4), step=4)
    manager.wait()
    assert names(tmp_path) == ["step-00000004"]


def test_a_refusal_is_told_at_once(tmp_path):
    manager = mg.CheckpointManager(tmp_path, asynchronous=True)
    with pytest.raises(mg.CheckpointError, match="fn is of type"):
        manager.save({"fn": print}, step=1)
    manager.wait()
    assert names(tmp_path) == []


def test_a_block_waits_and_raises(tmp_path, monkeypatch):
    with mg.CheckpointManager(tmp_path / "a", asynchronous=True) as manager:
        path = manager.save(state(1), step=1)
    assert path.exists()
    failing(monkeypatch)
    with (
        pytest.raises(mg.CheckpointError, match="No space"),
        mg.CheckpointManager(tmp_path / "b", asynchronous=True) as m,
    ):
        m.save(state(1), step=1)

    def interrupted():
        with mg.CheckpointManager(tmp_path / "c", asynchronous=True) as manager:
            manager.save(state(1), step=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        interrupted()
    assert "a save in the background failed too" in caught.value.__notes__[0]


END = """
import sys, torch, monograph as mg
manager = mg.CheckpointManager(sys.argv[1], asynchronous=True)
manager.save({"x": torch.ones(3_000_000), "y": torch.zeros(3_000_000)}, step=7)
"""


@pytest.mark.long
def test_the_end_of_the_program_waits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", END, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert mg.load(tmp_path / "step-00000007")["x"].sum() == 3_000_000
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", END, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert "a save in the background failed: cannot save" in done.stderr


def test_latest_while_one_is_written(tmp_path, gate):
    gate.set()
    manager = mg.CheckpointManager(tmp_path, asynchronous=True)
    manager.save(state(1), step=1)
    manager.wait()
    gate.clear()
    manager.save(state(2), step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.latest() == tmp_path / "step-00000001"
    gate.set()
    manager.wait()
    assert manager.latest() == tmp_path / "step-00000002"


def in_a_fork(run) -> str:
    """What went wrong in a forked process that runs this, which must take less than 10 s."""
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        signal.alarm(10)
        try:
            run()
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        said = told.read()
    _, status = os.waitpid(process, 0)
    return said or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")


@pytest.mark.parametrize("held", [False, True])
def test_a_forked_process_writes_its_own_saves(tmp_path, gate, monkeypatch, held):
    """The thread is not there after a fork; what waits for it, and the lock that it may hold, are the parent's."""
    manager = mg.CheckpointManager(tmp_path, keep=None, asynchronous=True)
    for step in (1, 2):
        manager.save(state(step), step=step)

    def save_more():
        monkeypatch.setattr(manager_module, "write", write)
        manager.wait()
        assert names(tmp_path) == []
        for step in (3, 4):
            manager.save(state(step), step=step)
            manager.wait()
        assert names(tmp_path) == ["step-00000003", "step-00000004"]

    with manager._lock if held else nullcontext():
        assert in_a_fork(save_more) == ""
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    gate.set()
    manager.wait()
    assert names(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]


def test_states_left_out_are_told_aloud_once(tmp_path, gate, caplog):
    manager = mg.CheckpointManager(tmp_path, keep=None, asynchronous=True)
    with warnings.catch_warnings(record=True) as told, caplog.at_level("INFO", "monograph"):
        warnings.simplefilter("always")
        for step in range(1, 6):
            manager.save(state(step), step=step)
    (only,) = told
    assert "step-00000002" in str(only.message)
    assert "The newest state is always written" in str(only.message)
    logged = [record.message for record in caplog.records if "left out" in record.message]
    assert [f"step-0000000{step}" in line for step, line in zip((2, 3, 4), logged, strict=True)] == [True] * 3
    gate.set()
    manager.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000005"]


def test_a_file_of_torch_save_is_told_what_to_do_with(tmp_path):
    torch.save(state(1), tmp_path / "plain.pt")
    with pytest.raises(mg.ArtifactError, match=r"file of torch\.save") as caught:
        mg.load(tmp_path / "plain.pt")
    assert "read it with torch.load()" in caught.value.hint
    assert "save the graph again" not in caught.value.hint
