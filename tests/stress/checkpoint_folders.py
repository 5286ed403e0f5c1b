"""What may happen to a folder of checkpoints while processes use it, and what may lie there already.

In every trial a checkpoint that is loaded is one that a save wrote, whole, and what cannot be done is a named error.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import monograph as mg
from tests.checkpoint.system_calls import count_calls
from tests.stress.checkpoint_processes import (
    READS,
    Numbered,
    ended,
    error_of,
    left_in,
    load_and_stop,
    newest_in,
    read_newest,
    read_on,
    save_on,
    step_of,
)
from tests.stress.child import Child, Parent
from tests.stress.kill_during_save import saver
from tests.stress.trials import Trial, fine, make_read_only, mounted, refused

MOVES = 12  # of a folder
NOBODY = 12345  # a user who may not write

# --- what becomes of the folder --------------------------------------------------------------------------------


def moved_meanwhile(way: str, move: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """The folder disappears again and again: readers find a whole checkpoint or none, savers go on or have an error."""

    def run(room: Path) -> None:
        folder = room / "folder"
        with (
            Child(save_on, way, folder, bears=True) as writer,
            Child(read_on, folder, times=4 * READS, bears=True) as reader,
        ):
            for number in range(MOVES):
                writer.hear("saved")
                time.sleep(0.003 * (number % 4))
                move(folder, room / f"moved-{number}")
            writer.hear("saved")
            fine(
                reader.outcome(), warnings=10 * READS, words=("skipped",)
            )  # each read tells of what is half removed
            done, _ = fine(ended(writer))
        assert done >= 1
        with Child(save_on, way, folder, first=10**7, last=10**7) as writer:  # and then all is as before
            fine(writer.outcome())
        assert newest_in(folder) == 10**7
        for place in room.glob("moved-*"):
            newest_in(place, warnings=1, words=("skipped",))

    return run


def _rename(folder: Path, goal: Path) -> None:
    if folder.exists():
        folder.rename(goal)


def _remove(folder: Path, _goal: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _copy(folder: Path, goal: Path) -> None:
    subprocess.run(["cp", "-r", str(folder), str(goal)], capture_output=True, check=False)  # files disappear


def linked(room: Path) -> None:
    """A link that shows another folder all the time."""
    link = room / "link"
    for name in ("a", "b"):
        (room / name).mkdir()
    link.symlink_to(room / "a")
    with Child(save_on, "manager", link, bears=True) as writer:
        writer.hear("saved")
        with Child(read_on, room / "a") as reader:
            assert None not in fine(reader.outcome())
        with Child(read_on, link, bears=True) as reader:
            for number in range(MOVES):
                (room / "next").symlink_to(room / "ba"[number % 2])
                (room / "next").replace(link)
                writer.hear("saved")
            fine(reader.outcome())
        fine(ended(writer))
    assert link.is_symlink()
    for name in ("a", "b"):
        newest_in(room / name)


def full_disk(room: Path) -> None:
    disk = room / "disk"
    with mounted(disk, "size=1m"):
        for way, keep in (("manager", None), ("asynchronous", None), ("overwrite", 1)):
            folder = disk / way
            folder.mkdir()
            with Child(fill, way, folder, keep) as writer:
                writer.hear("full")
                before = newest_in(folder) if way != "overwrite" else step_of(mg.load(folder / "last"))
                with Child(fill, way, folder, keep, first=1000) as another:
                    another.answer()
                    refused(another.outcome(), "No space left on device", str(folder))
                assert left_in(folder) == ([] if way != "overwrite" else ["filler"]), left_in(folder)
                if way == "overwrite":
                    assert step_of(mg.load(folder / "last")) == before
                    (folder / "filler").unlink()
                else:
                    assert newest_in(folder) == before
                    shutil.rmtree(folder / "step-00000001")
                writer.answer()
                fine(writer.outcome())
            shutil.rmtree(folder)


def fill(parent: Parent, way: str, folder: Path, keep: int | None, *, first: int = 1) -> int:
    """Save until the disk is full, tell it, and save once more when there is room."""
    manager = mg.CheckpointManager(folder, keep=keep, asynchronous=way == "asynchronous")

    def save(step: int) -> None:
        if way == "overwrite":
            mg.save(Numbered(step).state_dict(), folder / "last", overwrite=True)
        else:
            manager.save(Numbered(step).state_dict(), step=step)
            manager.wait()

    step = first
    while True:
        try:
            save(step)
        except mg.CheckpointError as error:
            if first > 1 or "No space left on device" not in str(error):
                raise
            break
        step += 1
        if way == "overwrite" and first == 1:
            with open(folder / "filler", "ab") as file:
                file.write(bytes(min(100_000, max(0, shutil.disk_usage(folder).free - 40_000))))
    parent.ask("full")
    save(step)
    return step


def read_only_folder(folder: Path) -> None:
    saver("manager", folder, wait=True)(Numbered(1))
    for place, mode in ((folder.parent, 0o755), (folder, 0o555), (folder / "step-00000001", 0o555)):
        place.chmod(mode)

    def as_nobody(parent: Parent) -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        assert read_on(parent, folder, times=3) == [1, 1, 1]
        for way in ("asynchronous", "manager"):
            error = error_of(lambda: saver(way, folder, wait=True)(Numbered(2)))  # noqa: B023
            assert "Permission denied" in error, error or f"{way}: it was saved"
            assert str(folder) in error, error

    with Child(as_nobody) as reader:
        fine(reader.outcome())
    assert os.listdir(folder) == ["step-00000001"]


def read_only_meanwhile(room: Path) -> None:
    disk = room / "disk"
    with mounted(disk, "size=4m"):
        with Child(save_until_refused, disk) as writer:
            last = writer.hear("saved")
            while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
                pass  # it is written to right now
            told = "cannot remove the old checkpoint"  # after a save that was right
            refused(writer.outcome(), "Read-only file system", str(disk), warning=told)
        assert (newest_in(disk) or 0) >= last
        make_read_only(disk)


def save_until_refused(parent: Parent, folder: Path) -> None:
    """As `save_on`, without an end."""
    save_on(parent, "manager", folder)


# --- what lies there already -----------------------------------------------------------------------------------


def fresh_run(folder: Path) -> None:
    old, before = mg.CheckpointManager(folder, keep=2), ["step-00000010", "step-00000020"]
    for step in (10, 20):
        old.save(Numbered(step).state_dict(), step=step)
    for way in ("manager", "asynchronous"):
        for first in (1, 10, 20):
            with Child(save_on, way, folder, first=first, last=first + 2) as fresh:
                refused(fresh.outcome(), "of another run", "step-00000020", "rewind=True")
            assert sorted(os.listdir(folder)) == before

    def hold(parent: Parent) -> tuple[int, int | None]:
        newest = mg.CheckpointManager(folder).latest()
        assert newest is not None
        parent.ask("holds")
        assert str(newest) in (error_of(lambda: mg.load(newest)) or str(newest))
        return 20, read_newest(folder)

    def rewind(_parent: Parent) -> None:
        manager = mg.CheckpointManager(folder, rewind=True)
        for step in (1, 2):
            manager.save(Numbered(step).state_dict(), step=step)

    with Child(hold) as reader:
        reader.hear("holds")
        with Child(rewind) as fresh:
            fine(fresh.outcome())
        reader.answer()
        assert fine(reader.outcome()) == (20, 2)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def stale_files(folder: Path) -> None:
    """What dead savers and other programs leave."""
    saver("manager", folder, wait=True, keep=1)(Numbered(1))
    dead = folder / ".step-00000002.tmp-0123abcd"
    shutil.copytree(folder / "step-00000001", dead)
    (dead / "manifest.json").unlink()
    (folder / ".step-00000001.tmp-0123abce").mkdir()  # taken away and not removed
    foreign = [".nfs0000000001", ".lock", "step-00000001.lock", "notes.txt", "step-2", "step-00000007.part"]
    for name in foreign:
        (folder / name).write_text("stale")
    (folder / "step-00000001" / "manifest-0123abcd.tmp").write_text("half")
    (folder / "step-00000001" / "tensors-0123abcd-00000.safetensors").write_text("half")
    assert newest_in(folder) == 1
    with Child(save_on, "manager", folder, first=2, last=3) as writer:
        fine(writer.outcome())
    assert sorted(os.listdir(folder)) == sorted([*foreign, "step-00000003"])
    for name in foreign:
        assert (folder / name).read_text() == "stale"


def spoilt_newest(folder: Path) -> None:
    """The newest is damaged in each way: the one before is given with one warning, also beside a saver."""
    for number, (name, spoil) in enumerate(SPOILS.items()):
        place = folder / str(number)
        save = saver("manager", place, wait=True, keep=3)
        for step in (1, 2):
            save(Numbered(step))
        spoil(place / "step-00000002")
        assert newest_in(place, warnings=1, words=("step-00000002",)) == 1, name
        with Child(save_on, "manager", place, first=2, last=4, bears=True) as writer:
            done, _ = fine(writer.outcome())
        assert done == (2 if name == "a file" else 3), name  # which a directory does not replace
        assert newest_in(place) == 4, name


def _cut(pattern: str, part: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (file,) = path.glob(pattern)
        os.truncate(file, int(file.stat().st_size * part))

    return cut


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _as_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no folder")


SPOILS: dict[str, Callable[[Path], None]] = {
    "half of the tensors": _cut("*.safetensors", 0.5),
    "no tensors": _cut("*.safetensors", 0),
    "half of the manifest": _cut("manifest.json", 0.5),
    "an empty manifest": _cut("manifest.json", 0),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty folder": _empty,
    "a file": _as_a_file,
}


def cut_while_read(folder: Path) -> None:
    """A reader that has opened a checkpoint, and somebody who cuts its file off."""
    save = saver("manager", folder, wait=True)
    save(Numbered(1))
    calls = count_calls(lambda: mg.load(folder / "step-00000001"))
    for call in range(1, calls + 1):
        save(Numbered(1))
        with Child(load_and_stop, folder, call) as reader:
            reader.has_stopped()
            _cut("*.safetensors", 0.5)(folder / "step-00000001")
            reader.signal(signal.SIGCONT)
            outcome = reader.outcome()
        if outcome.value is None:
            refused(outcome, "CheckpointError", "step-00000001")
        else:
            assert fine(outcome) == 1  # it had been read


TRIALS = (
    Trial("the folder is renamed meanwhile", "whole or none; a named error", moved_meanwhile("manager", _rename)),
    Trial("the folder is removed meanwhile", "whole or none; a named error", moved_meanwhile("manager", _remove)),
    Trial("the same, written in the background", "whole or none; a named error", moved_meanwhile("asynchronous", _remove)),
    Trial("the folder is copied meanwhile", "the copy has whole ones, or a warning", moved_meanwhile("manager", _copy)),
    Trial("a link to the folder that moves", "whole or none", linked),
    Trial("a full disk", "a named error; what was there stays; then it goes on", full_disk),
    Trial("a read-only folder", "it can be read; a save is a named error", read_only_folder),
    Trial("a disk that becomes read-only", "it can be read; a save is a named error", read_only_meanwhile),
    Trial("a fresh run in an older run's folder", "a named error, or rewind=True", fresh_run),
    Trial("stale temporary and lock files", "no harm; a saver's own are removed", stale_files),
    Trial("a damaged newest checkpoint", "the one before, with one warning", spoilt_newest),
    Trial("a checkpoint cut off while it is read", "whole, or a named error", cut_while_read),
)  # fmt: skip
