"""Readers beside a saver in another process: what latest() gives is there and whole; and each run has its own directory."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.checkpoint import files
from monograph.checkpoint import load as loading
from monograph.checkpoint.files import alone, opened
from monograph.checkpoint.steps import run as run_module
from tests.checkpoint.same import assert_equal

READS = 150

SAVER = """
import itertools, sys, torch, monograph as mg
way, directory = sys.argv[1:]
manager = mg.CheckpointManager(directory, keep=1, asynchronous=way == "asynchronous")
for step in itertools.count(1):
    state = {"step": step, "x": torch.full((20_000,), step), "y": [torch.full((9,), step)] * 3}
    if way == "overwrite":
        mg.save(state, directory + "/last", overwrite=True)
    else:
        manager.save(state, step=step)
        manager.wait()
    if step == 1:
        print("begun", flush=True)
"""


def names(directory) -> list[str]:
    return sorted(os.listdir(directory))


def state(step: int):
    return {"step": step, "x": torch.full((50,), step)}


@contextmanager
def saver(way: str, directory: Path):
    """A process that saves back to back."""
    process = subprocess.Popen([sys.executable, "-c", SAVER, way, str(directory)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield
        assert process.poll() is None, "the saver has died"
    finally:
        process.kill()
        process.communicate()


def check(loaded) -> int:
    step = loaded["step"]
    assert loaded["x"].eq(step).all()
    assert all(item.eq(step).all() for item in loaded["y"])
    return int(step)


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["manager", "asynchronous"])
def test_a_reader_beside_a_saver_that_keeps_one(tmp_path, way):
    manager, seen = mg.CheckpointManager(tmp_path), []
    with saver(way, tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(READS):
            reader = manager if number % 2 else mg.CheckpointManager(tmp_path)
            path = reader.latest()
            assert path is not None
            seen.append(check(mg.load(str(path) if number % 3 == 0 else path)))
            seen.append(check(mg.load(path)))
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


@pytest.mark.long
def test_a_reader_beside_a_saver_that_overwrites(tmp_path):
    with saver("overwrite", tmp_path):
        seen = [check(mg.load(tmp_path / "last")) for _ in range(READS)]
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def test_a_listing_is_not_torn(tmp_path, monkeypatch):
    """What a directory is told to hold while entries come and go is up to the system: here it misses both."""
    manager = mg.CheckpointManager(tmp_path, keep=1)
    manager.save(state(1), step=1)
    listdir = os.listdir
    saved = []

    def slow(path):
        if not saved and path == tmp_path:
            saved.append(True)
            before = listdir(path)
            done = subprocess.run([sys.executable, "-c", ONE_MORE, str(tmp_path)], capture_output=True)
            assert done.returncode == 0, done.stderr
            return [name for name in before if os.path.exists(os.path.join(path, name))]
        return listdir(path)

    monkeypatch.setattr("os.listdir", slow)
    path = mg.CheckpointManager(tmp_path).latest()
    assert path is not None
    assert check({"y": [], **mg.load(path)}) in (1, 2)


ONE_MORE = """
import sys, torch, monograph as mg
mg.CheckpointManager(sys.argv[1], keep=1).save({"step": 2, "x": torch.full((50,), 2)}, step=2)
"""


def test_what_was_asked_for_stays_until_it_is_let_go(tmp_path):
    saving, reading = mg.CheckpointManager(tmp_path, keep=1), mg.CheckpointManager(tmp_path)
    saving.save(state(1), step=1)
    path = reading.latest()
    for step in (2, 3):
        saving.save(state(step), step=step)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert_equal(state(1), mg.load(path))
    text = str(reading.latest())
    assert text.endswith("step-00000003")
    del path
    gc.collect()
    saving.save(state(4), step=4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert_equal(state(3), mg.load(text))


def test_a_run_that_resumed_needs_no_more_room(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=1)
    manager.save(state(1), step=1)
    newest = manager.latest()
    mg.load(newest)
    manager.save(state(2), step=2)
    assert names(tmp_path) == ["step-00000002"]
    assert newest == tmp_path / "step-00000001"


def test_a_held_path_is_a_path(tmp_path):
    manager = mg.CheckpointManager(tmp_path)
    manager.save(state(1), step=1)
    newest, plain = manager.latest(), tmp_path / "step-00000001"
    assert newest == plain
    assert (hash(newest), repr(newest)) == (hash(plain), repr(plain))
    assert type(pickle.loads(pickle.dumps(newest))) is type(plain)
    assert newest / "manifest.json" == plain / "manifest.json"
    assert newest.parent == tmp_path


def test_the_lock_goes_with_the_process_also_one_that_forked(tmp_path):
    manager = mg.CheckpointManager(tmp_path, keep=1)
    manager.save(state(1), step=1)
    path = manager.latest()
    child = os.fork()
    if child == 0:
        del path
        gc.collect()
        time.sleep(30)
        os._exit(0)
    try:
        manager.save(state(2), step=2)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]  # the child has not let it go
        mg.load(path)
        manager.save(state(3), step=3)
        assert names(tmp_path) == ["step-00000003"]  # though the child lives
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_where_there_are_no_locks_what_has_gone_is_looked_for_again(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path, keep=None)
    for step in (1, 2, 3):
        manager.save(state(step), step=step)

    def none(_fd, _kind):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", none)
    load = loading.load_checkpoint
    taken = []

    def load_too_late(path):
        if not taken:
            taken.append(path)
            Path(path).rename(tmp_path / "away")
        return load(path)

    monkeypatch.setattr("monograph.checkpoint.steps.manager.load_checkpoint", load_too_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.latest() == tmp_path / "step-00000002"
    mg.CheckpointManager(tmp_path, keep=1).save(state(4), step=4)
    assert names(tmp_path) == ["away", "step-00000004"]


def test_links_that_lead_nowhere_and_files_are_told(tmp_path):
    manager = mg.CheckpointManager(tmp_path)
    manager.save(state(1), step=1)
    (tmp_path / "step-00000002").symlink_to(tmp_path / "nothing")
    (tmp_path / "step-00000003").touch()
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert manager.latest() == tmp_path / "step-00000001"
    assert len(caught) == 2


@contextmanager
def stopped_inside(*paths: Path):
    """As if a saver were stopped that keeps these directories to itself."""
    with ExitStack() as stack:
        for path in paths:
            assert alone(stack.enter_context(opened(path)))
        yield


def test_no_reader_waits_for_a_saver_that_was_stopped(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path)
    paths = [manager.save(state(step), step=step) for step in (1, 2)]
    monkeypatch.setattr(files, "_READER_SECONDS", 0.01)
    with stopped_inside(tmp_path, *paths):
        newest = mg.CheckpointManager(tmp_path).latest()
        assert newest == paths[1]
        assert_equal(state(2), mg.load(newest))
        assert_equal(state(1), mg.load(paths[0]))
    del newest
    gc.collect()
    manager.save(state(3), step=3)


def test_where_there_are_no_locks_no_reader_waits(tmp_path, monkeypatch):
    path = mg.save(state(1), tmp_path / "checkpoint")

    def none(_fd, _kind):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", none)
    monkeypatch.setattr("time.sleep", lambda _seconds: pytest.fail("it waits"))
    assert_equal(state(1), mg.load(path))


def test_what_dead_savers_left_is_removed_under_its_lock(tmp_path, monkeypatch):
    """Else another process that has just made it might begin to write to it."""
    left = tmp_path / ".checkpoint.tmp-0123abcd"
    left.mkdir()
    remove, busy = files.remove_checkpoint, []

    def watch(path):
        with opened(path) as fd:
            busy.append(not alone(fd))
        remove(path)

    monkeypatch.setattr(files, "remove_checkpoint", watch)
    mg.save(state(1), tmp_path / "checkpoint")
    assert busy == [True]
    assert names(tmp_path) == ["checkpoint"]


def test_a_reader_without_a_lock_lists_again_before_it_says_that_there_is_nothing(tmp_path, monkeypatch):
    mg.CheckpointManager(tmp_path).save(state(1), step=1)
    listdir, listed = os.listdir, []

    def torn(path):
        listed.append(path)
        return listdir(path) if len(listed) > 1 else []

    monkeypatch.setattr(files, "_READER_SECONDS", 0.01)
    monkeypatch.setattr("os.listdir", torn)
    with stopped_inside(tmp_path):
        assert mg.CheckpointManager(tmp_path).latest() == tmp_path / "step-00000001"


def test_a_saver_says_that_another_was_stopped(tmp_path, monkeypatch):
    path = mg.save(state(1), tmp_path / "checkpoint")
    monkeypatch.setattr(files, "_SAVER_SECONDS", 0.01)
    with (
        stopped_inside(path),
        pytest.raises(mg.CheckpointError, match=r'cannot save ".*checkpoint": another process') as caught,
    ):
        mg.save(state(2), path, overwrite=True)
    assert "kill -CONT" in caught.value.hint
    assert_equal(state(1), mg.load(path))
    assert_equal(state(2), mg.load(mg.save(state(2), path, overwrite=True)))


def test_a_new_directory_that_is_taken_for_abandoned_is_left_to_who_took_it(tmp_path, monkeypatch):
    mkdir, taken = Path.mkdir, []

    def take(self, *args, **options):
        mkdir(self, *args, **options)
        if ".tmp-" in self.name and not taken:
            taken.append(self)
            assert alone(stack.enter_context(opened(self)))

    monkeypatch.setattr(Path, "mkdir", take)
    with ExitStack() as stack:
        path = mg.save(state(1), tmp_path / "checkpoint")
        assert_equal(state(1), mg.load(path))
        assert names(tmp_path) == [taken[0].name, "checkpoint"]
    mg.save(state(2), path, overwrite=True)


# --- a directory for each run ----------------------------------------------------------------------------------


def test_another_runs_higher_steps_are_an_error(tmp_path):
    old = mg.CheckpointManager(tmp_path, keep=2)
    for step in (10, 20):
        old.save(state(step), step=step)
    for every in (None, 7):
        fresh = mg.CheckpointManager(tmp_path, keep=2, every=every)
        with pytest.raises(
            mg.CheckpointError, match=r"step 5 is not saved: .* holds step-00000020 of another run"
        ) as e:
            fresh.save(state(5), step=5)
        assert "rewind=True" in e.value.hint
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_rewinding_is_a_choice(tmp_path):
    old = mg.CheckpointManager(tmp_path, keep=None)
    for step in (3, 10, 20):
        old.save(state(step), step=step)
    held = mg.CheckpointManager(tmp_path).latest()
    fresh = mg.CheckpointManager(tmp_path, keep=3, rewind=True)
    fresh.save(state(5), step=5)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    assert fresh.latest() == tmp_path / "step-00000005"
    assert "rewind=True" in repr(fresh)
    assert held is not None


def test_going_on_behind_a_damaged_one(tmp_path):
    old = mg.CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        old.save(state(step), step=step)
    for step in (2, 3):
        file = next((tmp_path / f"step-0000000{step}").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    again = mg.CheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match="skipped"):
        assert again.latest() == tmp_path / "step-00000001"
    again.save(state(2), step=2)
    again.save(state(3), step=3)
    assert again.latest() == tmp_path / "step-00000003"


def test_another_runs_step_of_the_same_number_is_an_error(tmp_path):
    old = mg.CheckpointManager(tmp_path)
    for step in (10, 20):
        old.save(state(step), step=step)
    fresh = mg.CheckpointManager(tmp_path)
    with pytest.raises(
        mg.CheckpointError, match=r"step 20 is not saved: .* holds step-00000020 of another run"
    ):
        fresh.save({"fresh": 1}, step=20)
    assert_equal(state(20), mg.load(tmp_path / "step-00000020"))
    fresh.save({"fresh": 1}, step=21)


@pytest.mark.parametrize("way", ["saved", "resumed", "rewind"])
def test_a_step_that_is_ours_is_replaced(tmp_path, way):
    old = mg.CheckpointManager(tmp_path)
    for step in (10, 20):
        old.save(state(step), step=step)
    again = old if way == "saved" else mg.CheckpointManager(tmp_path, rewind=way == "rewind")
    if way == "resumed":
        mg.load(again.latest())
    for _ in range(2):
        again.save({"again": 1}, step=20)
    assert mg.load(tmp_path / "step-00000020") == {"again": 1}
    if way == "resumed":
        with pytest.raises(mg.CheckpointError, match="of another run"):
            mg.CheckpointManager(tmp_path).save({}, step=5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_another_run_saves_meanwhile_stays(tmp_path, monkeypatch, asynchronous):
    slow = mg.CheckpointManager(tmp_path, asynchronous=asynchronous)
    fsync = os.fsync

    def late(fd):
        monkeypatch.setattr("os.fsync", fsync)
        mg.CheckpointManager(tmp_path).save(state(4), step=4)
        fsync(fd)

    def save_slowly():
        slow.save({"slow": 1}, step=4)
        slow.wait()

    monkeypatch.setattr("os.fsync", late)
    for _ in range(2):  # nor is it ours because we tried
        with pytest.raises(mg.CheckpointError, match=r"step 4 is not saved: .* of another run") as caught:
            save_slowly()
        assert "latest()" in caught.value.hint
    assert_equal(state(4), mg.load(tmp_path / "step-00000004"))
    assert names(tmp_path) == ["step-00000004"]


def test_a_step_that_was_not_saved_is_not_ours(tmp_path, monkeypatch):
    manager = mg.CheckpointManager(tmp_path)

    def full(_fd, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(mg.CheckpointError, match="No space"):
            manager.save(state(4), step=4)
    mg.CheckpointManager(tmp_path).save(state(4), step=4)
    with pytest.raises(mg.CheckpointError, match=r"step 4 is not saved: .* of another run"):
        manager.save({"again": 1}, step=4)


def test_what_another_run_saved_beyond_stays(tmp_path, monkeypatch):
    """A saver that was stopped wakes up beside a run that went on."""
    slow = mg.CheckpointManager(tmp_path, keep=1)
    slow.save(state(3), step=3)
    fsync = os.fsync

    def late(fd):
        monkeypatch.setattr("os.fsync", fsync)
        other = mg.CheckpointManager(tmp_path, keep=1)
        for step in (5, 6, 7):
            other.save(state(step), step=step)
        fsync(fd)

    monkeypatch.setattr("os.fsync", late)
    slow.save(state(4), step=4)
    assert names(tmp_path) == ["step-00000004", "step-00000007"]
    with pytest.raises(mg.CheckpointError, match="of another run"):
        slow.save(state(5), step=5)


def test_two_that_remove_at_once_leave_one(tmp_path, monkeypatch):
    one, two = (mg.CheckpointManager(tmp_path, keep=1) for _ in range(2))
    one.save(state(20), step=20)
    mg.load(two.latest())
    complete = run_module.is_complete

    def late(path):
        monkeypatch.setattr(run_module, "is_complete", complete)
        two.save(state(20), step=20)
        return complete(path)

    monkeypatch.setattr(run_module, "is_complete", late)
    one.save(state(5), step=5)
    assert names(tmp_path) == ["step-00000020"]
