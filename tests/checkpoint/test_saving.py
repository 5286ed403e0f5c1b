"""A save that fails at any call leaves the old checkpoint or the new one, and no files of its own."""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress

import pytest
import torch

import monograph as mg
from monograph.checkpoint import files
from monograph.checkpoint import write as writing
from monograph.checkpoint.files import is_ours, remove_checkpoint
from tests.checkpoint.same import assert_equal, difference
from tests.checkpoint.system_calls import count_calls, watched

OLD = {"step": 1, "x": torch.ones(300), "y": torch.ones(100, dtype=torch.int64)}
NEW = {"step": 2, "x": torch.zeros(300), "y": torch.zeros(100, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def _several_files(monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1000)


def test_parents_are_made_and_the_path_is_returned(tmp_path):
    path = tmp_path / "a" / "b" / "checkpoint"
    assert mg.save(OLD, str(path)) == path
    assert_equal(OLD, mg.load(str(path)))
    assert sorted(file.name for file in path.parent.iterdir()) == ["checkpoint"]
    assert oct(path.stat().st_mode) == oct(path.parent.stat().st_mode)


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mg.save(OLD, "checkpoint")
    mg.save(NEW, "checkpoint", overwrite=True)
    assert_equal(NEW, mg.load("checkpoint"))


def test_an_existing_path_needs_overwrite(tmp_path):
    path = mg.save(OLD, tmp_path / "checkpoint")
    with pytest.raises(mg.CheckpointError, match="it exists already") as caught:
        mg.save(NEW, path)
    assert "overwrite=True" in caught.value.hint
    assert_equal(OLD, mg.load(path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(mg.CheckpointError, match="it exists already"):
            mg.save(NEW, tmp_path / name)
    for name in ("file", "link"):
        with pytest.raises(mg.CheckpointError, match="it exists and is no directory"):
            mg.save(NEW, tmp_path / name, overwrite=True)
    assert_equal(NEW, mg.load(mg.save(NEW, tmp_path / "empty", overwrite=True)))


def test_overwrite_leaves_the_new_files_only(tmp_path):
    path = mg.save(OLD, tmp_path / "checkpoint", overwrite=True)
    before = set(os.listdir(path))
    mg.save(NEW, path, overwrite=True)
    assert_equal(NEW, mg.load(path))
    assert set(os.listdir(path)) & before == {"manifest.json"}
    assert len(os.listdir(path)) == len(before)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_overwrite_spares_what_is_not_a_checkpoint(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(
        mg.CheckpointError, match=r"it holds 'chapter\.tex', which is no part of a checkpoint"
    ):
        mg.save(OLD, tmp_path / "thesis", overwrite=True)
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]


@pytest.mark.parametrize("damage", ["manifest", "file", "cut"])
def test_overwrite_replaces_a_damaged_checkpoint(damage, tmp_path):
    path = mg.save(OLD, tmp_path / "checkpoint")
    victim = path / "manifest.json" if damage == "manifest" else next(path.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:50] if damage == "cut" else b"nonsense")
    mg.save(NEW, path, overwrite=True)
    assert_equal(NEW, mg.load(path))
    assert len(os.listdir(path)) == 1 + len(list(path.glob("*.safetensors")))


def places(tmp_path):
    """A new path, and one that is overwritten."""
    mg.save(OLD, tmp_path / "there", overwrite=True)
    return {"new": tmp_path / "new", "there": tmp_path / "there"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("place", ["new", "there"])
def test_every_call_may_fail(place, code, tmp_path):
    """A full, read-only or broken disk shows itself at any call of a save."""
    path = places(tmp_path / "count")[place]
    calls = count_calls(lambda: mg.save(NEW, path, overwrite=True))
    assert calls > 15
    for number in range(1, calls + 1):
        path = places(tmp_path / str(number))[place]

        def fail(at, name, args, number=number):
            if at == number and name != "close":
                raise OSError(code, os.strerror(code), str(args[0]))

        with watched(fail, lambda _at, _name: None):
            message = failure_of(lambda path=path: mg.save(NEW, path, overwrite=True))
        assert message in (None, f'cannot save "{path}": {os.strerror(code)}')
        check_after_failure(path)


def failure_of(function):
    """The message of the error that a save ends with; some calls only tidy up, and may fail unseen."""
    try:
        function()
    except mg.CheckpointError as error:
        return error.message
    return None


def check_after_failure(path):
    """The old or the new state, and nothing else beside or in the directory."""
    others = [name for name in os.listdir(path.parent) if name not in ("there", path.name)]
    assert others == []
    if path.exists():
        loaded = mg.load(path)
        assert difference(NEW, loaded) is None or difference(OLD, loaded) is None
        used = len(list(path.glob("*.safetensors")))
        assert used in (2, 3, 4)  # files of an old checkpoint that cannot be removed do no harm
        assert len(os.listdir(path)) == used + 1
    else:
        assert path.name == "new"


@pytest.mark.parametrize("place", ["new", "there"])
def test_no_space_left(place, tmp_path, monkeypatch):
    """Part of a write is done, and from then on nothing more."""
    path = places(tmp_path)[place]
    write, left = os.write, [1500]

    def full(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, memoryview(data)[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr("os.write", full)
    with pytest.raises(mg.CheckpointError, match="No space left on device"):
        mg.save(NEW, path, overwrite=True)
    monkeypatch.undo()
    assert path.exists() == (place == "there")
    assert_equal(OLD, mg.load(tmp_path / "there"))
    assert os.listdir(tmp_path) == ["there"]
    assert len(os.listdir(tmp_path / "there")) == 1 + len(list((tmp_path / "there").glob("*.safetensors")))


@pytest.mark.parametrize("place", ["new", "there"])
def test_an_interrupt_at_every_call(place, tmp_path):
    """Also one that comes right behind a rename: what was renamed is not removed."""
    path = places(tmp_path / "count")[place]
    calls = count_calls(lambda: mg.save(NEW, path, overwrite=True))
    for number in range(1, calls + 1):
        path = places(tmp_path / str(number))[place]

        def interrupt(at, name, number=number):
            if at == number and name != "close":
                raise KeyboardInterrupt

        with watched(lambda _at, _name, _args: None, interrupt), suppress(KeyboardInterrupt):
            mg.save(NEW, path, overwrite=True)
        if path.exists():
            loaded = mg.load(path)
            assert difference(NEW, loaded) is None or difference(OLD, loaded) is None
        else:
            assert place == "new"


def test_what_a_killed_save_left_is_cleared(tmp_path):
    path = mg.save(OLD, tmp_path / "checkpoint")
    abandoned = tmp_path / ".checkpoint.tmp-0123abcd"
    abandoned.mkdir()
    (abandoned / "tensors-0123abcd-00000.safetensors").write_bytes(b"half")
    foreign = tmp_path / ".checkpoint.tmp-0123abce"
    foreign.mkdir()
    (foreign / "mine.txt").touch()
    other = tmp_path / ".other.tmp-0123abcd"
    other.mkdir()
    (path / "tensors-0123abcd-00000.safetensors").write_bytes(b"half")
    (path / "manifest-0123abcd.tmp").write_bytes(b"half")
    assert_equal(OLD, mg.load(path))
    mg.save(NEW, path, overwrite=True)
    assert_equal(NEW, mg.load(path))
    assert all(is_ours(name) for name in os.listdir(path))
    assert not list(path.glob("*0123abcd*"))
    mg.save(NEW, tmp_path / "else")
    assert abandoned.exists()  # not this path's
    path.rename(tmp_path / "moved")
    mg.save(NEW, path)
    assert not abandoned.exists()
    assert (foreign / "mine.txt").exists()
    assert other.exists()


def test_two_savers_of_one_new_path(tmp_path, monkeypatch):
    """The slower one of two finds the path taken: an error, or with overwrite the last one wins."""
    path = tmp_path / "checkpoint"
    rename = os.rename

    def slow(source, target, **options):
        if str(target) == str(path) and not path.exists():
            monkeypatch.setattr("os.rename", rename)
            mg.save(OLD, path)
        rename(source, target, **options)

    monkeypatch.setattr("os.rename", slow)
    with pytest.raises(mg.CheckpointError, match="it exists already"):
        mg.save(NEW, path)
    assert_equal(OLD, mg.load(path))
    path.rename(tmp_path / "away")
    monkeypatch.setattr("os.rename", slow)
    mg.save(NEW, path, overwrite=True)
    assert_equal(NEW, mg.load(path))
    assert sorted(os.listdir(tmp_path)) == ["away", "checkpoint"]


def test_a_saver_that_comes_between_keeps_its_files(tmp_path, monkeypatch):
    """The slower saver clears up when the faster one has long replaced its checkpoint."""
    path = mg.save({}, tmp_path / "checkpoint")
    alone = writing.alone

    def late(fd):
        monkeypatch.setattr(writing, "alone", alone)
        mg.save(OLD, path, overwrite=True)
        return alone(fd)

    monkeypatch.setattr(writing, "alone", late)
    mg.save(NEW, path, overwrite=True)
    assert_equal(OLD, mg.load(path))


def test_many_savers_and_readers_of_one_path(tmp_path):
    path = tmp_path / "checkpoint"
    states = [{"n": n, "x": torch.full((400,), n), "y": torch.full((300,), n)} for n in range(4)]
    troubles: list[BaseException] = []

    def guarded(work):
        try:
            for _ in range(25):
                work()
        except BaseException as error:
            troubles.append(error)

    def read():
        loaded = mg.load(path)
        assert_equal(states[loaded["n"]], loaded)

    mg.save(states[0], path)
    work = [lambda state=state: mg.save(state, path, overwrite=True) for state in states]
    threads = [threading.Thread(target=guarded, args=(one,)) for one in (*work, read, read)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert troubles == []
    read()
    mg.save(states[0], path, overwrite=True)  # alone, it clears what others left
    assert len(os.listdir(path)) == 1 + len(list(path.glob("*.safetensors"))) == 3
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_file_systems_without_locks_or_synced_directories(tmp_path, monkeypatch):
    fsync = os.fsync

    def no_lock(_fd, _kind):
        raise OSError(errno.ENOLCK, "No locks available")

    def files_only(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr("os.fsync", files_only)
    path = mg.save(OLD, tmp_path / "checkpoint")
    mg.save(NEW, path, overwrite=True)
    assert_equal(NEW, mg.load(path))
    assert len(os.listdir(path)) == 1 + len(list(path.glob("*.safetensors"))) == 3


def test_the_manifest_goes_first_so_that_half_a_checkpoint_is_none(tmp_path, monkeypatch):
    path, removed = mg.save(OLD, tmp_path / "checkpoint"), []
    unlink = os.unlink

    def fail_after_one(name, **options):
        if removed:
            raise OSError(errno.EIO, "the disk is gone")
        unlink(name, **options)
        removed.append(name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail_after_one)
        with pytest.raises(OSError, match="the disk is gone"):
            remove_checkpoint(path)
    assert removed == ["manifest.json"]
    with pytest.raises(mg.CheckpointError, match=r"no manifest\.json"):
        mg.load(path)


def test_a_new_directory_that_another_saver_takes_for_abandoned(tmp_path, monkeypatch):
    share, taken = files._share, []

    def take_the_first(fd, seconds):
        if not taken:
            (directory,) = tmp_path.iterdir()
            directory.rmdir()
            taken.append(directory)
        return share(fd, seconds)

    monkeypatch.setattr(files, "_share", take_the_first)
    path = mg.save(OLD, tmp_path / "checkpoint")
    assert taken
    assert_equal(OLD, mg.load(path))
