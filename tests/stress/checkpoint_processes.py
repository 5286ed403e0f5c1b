"""Several processes on one folder of checkpoints: readers, savers, killed and stopped ones, and who moves the folder.

In every trial a checkpoint that is loaded is one that a save wrote, whole, and what cannot be done is a named error.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import monograph as mg
from tests.checkpoint.same import difference
from tests.checkpoint.system_calls import count_calls, watched
from tests.stress.child import Child, Lost, Parent
from tests.stress.kill_during_save import (
    WAYS,
    Kill,
    Training,
    calls_of_a_save,
    check,
    killed_run,
    saver,
    the_uninterrupted_run,
)
from tests.stress.trials import Trial, fine

READS = 60
READER_SECONDS = 3.0  # that the longest read may take


@dataclass(frozen=True)
class Numbered:
    """A state that tells from which step each of its numbers is."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        """Everything is the step."""
        return {
            "step": self.step,
            "x": torch.full((20_000,), self.step),
            "y": [torch.full((9,), self.step)] * 3,
        }


@cache
def trail() -> list[dict[str, Any]]:
    """The states of a training that nobody disturbs."""
    return the_uninterrupted_run()


def step_of(loaded: mg.Checkpoint) -> int:
    """The step of a checkpoint, which has every bit of a state that was saved."""
    step = int(loaded["step"])
    found = difference(Numbered(step).state_dict(), dict(loaded))
    assert found is None, f"step {step} is not what was saved: {found}"
    return step


def spread(number: int, of: int) -> list[int]:
    """So many calls of a save, from the first to the last."""
    return sorted({1 + round(index * (of - 1) / (number - 1)) for index in range(number)})


# --- what the processes do -------------------------------------------------------------------------------------


def save_on(
    parent: Parent, way: str, folder: Path, *, first: int = 1, last: int = 10**6, bears: bool = False
) -> tuple[int, int]:
    """Save step by step until the parent answers: how many saves were done, and how many refused if it `bears` that."""
    save = saver(way, folder, wait=True, keep=1)
    done = failed = 0
    for step in range(first, last + 1):
        try:
            save(Numbered(step))
            done += 1
        except mg.CheckpointError:
            if not bears:
                raise
            failed += 1
        parent.tell("saved", step)
        if not parent.is_waiting():
            break
    return done, failed


def read_on(_parent: Parent, folder: Path, *, times: int = READS, bears: bool = False) -> list[int | None]:
    """Load the newest again and again: the steps, None where there is nothing, or it went if the reader `bears` that."""
    return [read_newest(folder, bears=bears) for _ in range(times)]


def read_newest(folder: Path, *, bears: bool = False) -> int | None:
    newest = mg.CheckpointManager(folder).latest()
    try:
        return None if newest is None else step_of(mg.load(newest))
    except mg.CheckpointError:
        if bears:
            return None
        raise


def read_path_on(_parent: Parent, path: Path, *, times: int = READS) -> list[int]:
    """Load one path again and again."""
    return [step_of(mg.load(path)) for _ in range(times)]


def error_of(run: Callable[[], object]) -> str:
    """The named error of something that cannot be done; "" if it was done."""
    try:
        run()
    except mg.CheckpointError as error:
        return str(error)
    return ""


def ended(process: Child) -> Any:
    """Let `save_on` end."""
    process.answer()
    return process.outcome()


def newest_in(folder: Path, **options: Any) -> int | None:
    """The step that a process of its own finds in a folder."""
    with Child(read_on, folder, times=1) as reader:
        steps: list[int | None] = fine(reader.outcome(), **options)
    return steps[0]


def left_in(folder: Path) -> list[str]:
    """What is there besides steps, and besides a checkpoint that is overwritten."""
    return sorted(name for name in os.listdir(folder) if not re.fullmatch(r"step-\d+|last", name))


def check_readers(seen: list[int]) -> None:
    """They saw a writer at work, and never an older step after a newer one."""
    assert seen == sorted(seen), f"an older one after a newer one: {seen}"
    assert len(set(seen)) > 2, f"the writer did nothing meanwhile: {seen}"


# --- readers and writers ---------------------------------------------------------------------------------------


def readers_beside_a_writer(way: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        reads = (read_path_on, folder / "last") if way == "overwrite" else (read_on, folder)
        with Child(save_on, way, folder) as writer:
            writer.hear("saved")
            with Child(*reads) as one, Child(*reads) as two:
                for reader in (one, two):
                    check_readers(fine(reader.outcome()))
            fine(ended(writer))

    return run


def two_writers(way: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with Child(save_on, way, folder, last=READS, bears=True) as one:
            one.hear("saved")
            with Child(save_on, way, folder, last=READS, bears=True) as two:
                two.hear("saved")
                reads = (read_path_on, folder / "last") if way == "overwrite" else (read_on, folder)
                with Child(*reads) as reader:
                    seen = fine(reader.outcome())
                counts = [fine(writer.outcome()) for writer in (one, two)]
        assert None not in seen, "a reader found no checkpoint"
        assert all(sum(count) == READS for count in counts)
        newest = step_of(mg.load(folder / "last")) if way == "overwrite" else newest_in(folder)
        assert newest == READS, f"the newest is {newest}"
        assert left_in(folder) == []

    return run


# --- killed and stopped ----------------------------------------------------------------------------------------


def killed_and_another_goes_on(folder: Path) -> None:
    for way in WAYS:
        for call in spread(4, _calls(way, folder / f"{way}-calls")):
            place = folder / f"{way}-{call}"
            place.mkdir()
            last, killed = killed_run(way, place, Kill(save=4, call=call, phase="inside"))
            assert killed
            with Child(lambda _parent: check(way, place, last, trail(), way)) as another:  # noqa: B023
                fine(another.outcome())


def _calls(way: str, folder: Path, keep: int = 2) -> int:
    folder.mkdir()
    return calls_of_a_save(way, folder, 4, keep=keep)


def train_and_stop(parent: Parent, way: str, folder: Path, call: int, keep: int) -> list[str]:
    """Stop inside of the save of step 4, go on when woken, and try to save step 5: the errors."""
    training, save = Training(), saver(way, folder, wait=True, keep=keep)
    errors = []
    for step in range(1, 6):
        training.advance()
        try:
            if step != 4:
                save(training)
                continue
            with watched(
                lambda number, _name, _args: parent.stop() if number == call else None, lambda *_: None
            ):
                save(training)
        except mg.CheckpointError as error:
            errors.append(str(error))
    return errors


def resume(_parent: Parent, folder: Path, keep: int) -> int:
    """Go on from the newest for three steps, saving each, with the numbers of a training that nobody disturbs."""
    manager, training = mg.CheckpointManager(folder, keep=keep), Training()
    training.load_state_dict(mg.load(manager.latest()))  # type: ignore[arg-type]
    for _ in range(3):
        training.advance()
        manager.save(training.state_dict(), step=training.step)
    return same_as_undisturbed(_parent, folder)


def same_as_undisturbed(_parent: Parent, folder: Path) -> int:
    """The step of the newest checkpoint, which is what a training that nobody disturbs had."""
    loaded = mg.load(mg.CheckpointManager(folder).latest())  # type: ignore[arg-type]
    found = difference(trail()[loaded["step"]], dict(loaded))
    assert found is None, f"step {loaded['step']} is not what was saved: {found}"
    return int(loaded["step"])


def stopped_and_another_goes_on(*, keep: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        for way in ("manager", "asynchronous"):
            for call in spread(4, _calls(way, folder / f"{way}-calls", keep)):
                place = folder / f"{way}-{call}"
                place.mkdir()
                with Child(train_and_stop, way, place, call, keep) as stopped:
                    stopped.has_stopped()
                    with Child(resume, place, keep) as another:
                        went_to = fine(another.outcome())
                    stopped.signal(signal.SIGCONT)
                    errors = fine(stopped.outcome())
                with Child(same_as_undisturbed, place) as reader:
                    newest = fine(reader.outcome())
                what = f"{way}, stopped at call {call}"
                assert newest == went_to, f"{what}: the other went to step {went_to}, the newest is {newest}"
                assert all("of another run" in error for error in errors), f"{what}: {errors}"
                assert errors, f"{what}: step 5 was saved among those of another run"

    return run


def stopped_then_killed(folder: Path) -> None:
    for call in spread(5, _calls("manager", folder / "calls", 1)):
        place = folder / str(call)
        place.mkdir()
        with Child(train_and_stop, "manager", place, call, 1) as stopped:
            stopped.has_stopped()
            with Child(resume, place, 1) as another:
                fine(another.outcome())
        with Child(resume, place, 1) as another:
            went_to = fine(another.outcome())
        assert os.listdir(place) == [f"step-{went_to:08}"], (
            f"stopped at call {call}: left {os.listdir(place)}"
        )


def overwrite_and_stop(parent: Parent, path: Path, call: int) -> None:
    """Stop inside of a save."""
    with watched(lambda number, *_: parent.stop() if number == call else None, lambda *_: None):
        mg.save(Numbered(2).state_dict(), path, overwrite=True)


def overwrite(_parent: Parent, path: Path) -> None:
    """Save once more."""
    mg.save(Numbered(3).state_dict(), path, overwrite=True)


def overwriter_stopped(folder: Path) -> None:
    """At each call up to the one by which the new state is there."""
    path = folder / "last"
    mg.save(Numbered(1).state_dict(), path)
    names: list[str] = []
    with watched(lambda _number, name, _args: names.append(name), lambda *_: None):
        mg.save(Numbered(1).state_dict(), path, overwrite=True)
    for call in range(1, names.index("rename") + 2):
        with Child(overwrite_and_stop, path, call) as stopped:
            stopped.has_stopped()
            assert step_of(mg.load(path)) in (1, 2)
            with Child(overwrite, path) as another:
                fine(another.outcome())
            assert step_of(mg.load(path)) == 3
            stopped.signal(signal.SIGCONT)
            fine(stopped.outcome())
        assert step_of(mg.load(path)) in (2, 3), f"stopped at call {call}"
        mg.save(Numbered(1).state_dict(), path, overwrite=True)
        assert len(os.listdir(path)) == 2, f"stopped at call {call}: left {os.listdir(path)}"


def readers_of_a_stopped_writer(way: str) -> Callable[[Path], None]:
    """Wherever the writer stops, also while it removes what is old and has locked others out."""

    def run(folder: Path) -> None:
        save = saver(way, folder, wait=True, keep=1)
        save(Numbered(1))
        calls = count_calls(lambda: save(Numbered(2)))
        reads = (read_path_on, folder / "last") if way == "overwrite" else (read_on, folder)
        waiting = []
        for call in range(1, calls + 1):
            with Child(save_and_stop, way, folder, call) as stopped:
                stopped.has_stopped()
                with Child(*reads, times=1) as reader:
                    try:
                        fine(reader.outcome(seconds=READER_SECONDS))
                    except Lost:
                        waiting.append(call)
        assert not waiting, f"readers wait for a writer that was stopped at calls {waiting} of {calls}"

    return run


def save_and_stop(parent: Parent, way: str, folder: Path, call: int) -> None:
    """Stop inside of the second save."""
    save, step = saver(way, folder, wait=True, keep=1), 2 * call + 1
    save(Numbered(step))
    with watched(lambda number, *_: parent.stop() if number == call else None, lambda *_: None):
        save(Numbered(step + 1))


def load_and_stop(parent: Parent, folder: Path, call: int) -> int:
    """Stop inside of a load."""
    newest = mg.CheckpointManager(folder).latest()
    assert newest is not None
    with watched(lambda number, *_: parent.stop() if number == call else None, lambda *_: None):
        return step_of(mg.load(newest))


def reader_stopped(folder: Path) -> None:
    save = saver("manager", folder, wait=True, keep=1)
    save(Numbered(1))
    calls = count_calls(lambda: mg.load(folder / "step-00000001"))
    step = 1
    for call in range(1, calls + 1):
        for killed in (False, True):
            with Child(load_and_stop, folder, call) as reader:
                reader.has_stopped()
                for _ in range(2):
                    step += 1
                    save(Numbered(step))
                assert len(os.listdir(folder)) == 2, f"call {call}: what is read is not kept"
                if not killed:
                    reader.signal(signal.SIGCONT)
                    assert fine(reader.outcome()) == step - 2
            step += 1
            save(Numbered(step))
            assert os.listdir(folder) == [f"step-{step:08}"], f"call {call}: left {os.listdir(folder)}"


# --- forks -----------------------------------------------------------------------------------------------------


def forked_saves(folder: Path) -> None:
    """One manager in two processes, each with steps of its own turn."""
    manager = mg.CheckpointManager(folder, keep=2)

    def save(_parent: Parent, step: int) -> None:
        manager.save(Numbered(step).state_dict(), step=step)

    def both(parent: Parent) -> list[int | None]:
        seen = []
        for step in range(1, 20, 2):
            save(parent, step)
            held = manager.latest()
            with Child(save, step + 1) as forked:
                fine(forked.outcome())
            assert held is not None
            seen += [step_of(mg.load(held)), read_newest(folder)]
        return seen

    with Child(both) as process:
        assert fine(process.outcome()) == list(range(1, 21))


def forked_in_mid_save(folder: Path) -> None:
    """The thread that writes is not there after a fork."""

    def fork(_parent: Parent) -> list[int | None]:
        manager = mg.CheckpointManager(folder, keep=None, asynchronous=True)
        begun, go_on = threading.Event(), threading.Event()

        def hold(number: int, _name: str, _args: tuple[Any, ...]) -> None:
            if number == 3:
                begun.set()
                go_on.wait(20)

        def save_more(_parent: Parent) -> None:
            manager.save(Numbered(2).state_dict(), step=2)
            manager.wait()

        with watched(hold, lambda *_: None):
            manager.save(Numbered(1).state_dict(), step=1)
            assert begun.wait(20)
            forked = Child(save_more)
            go_on.set()
            manager.wait()
        with forked:
            fine(forked.outcome())
        return [read_newest(folder)]

    with Child(fork) as process:
        newest = fine(process.outcome())
    assert newest == [2], (
        f"what the forked process saved is not there, and nothing was said: newest is {newest}"
    )


TRIALS = (
    Trial("readers beside a writer that keeps one", "whole, in order, no warning", readers_beside_a_writer("manager")),
    Trial("readers beside a writer in the background", "whole, in order, no warning", readers_beside_a_writer("asynchronous")),
    Trial("readers of a path that is overwritten", "whole, in order, no warning", readers_beside_a_writer("overwrite")),
    Trial("two writers of the same steps", "whole; done or a named error", two_writers("manager")),
    Trial("two writers in the background", "whole; done or a named error", two_writers("asynchronous")),
    Trial("two writers that overwrite one path", "whole; done or a named error", two_writers("overwrite")),
    Trial("a writer killed in mid save, another goes on", "the numbers of an undisturbed run", killed_and_another_goes_on),
    Trial("a writer stopped in mid save, another goes on", "the newest stays; then a named error", stopped_and_another_goes_on(keep=2)),
    Trial("the same, and each keeps one", "the newest stays; then a named error", stopped_and_another_goes_on(keep=1)),
    Trial("a writer stopped in mid save, then killed", "what it left is removed", stopped_then_killed),
    Trial("a writer stopped while it overwrites", "whole; nothing is left behind", overwriter_stopped),
    Trial("readers beside a stopped writer", "whole, in 3 s", readers_of_a_stopped_writer("manager")),
    Trial("readers of a path whose writer is stopped", "whole, in 3 s", readers_of_a_stopped_writer("overwrite")),
    Trial("a reader stopped or killed in mid load", "what it reads stays, and then goes", reader_stopped),
    Trial("a forked process saves", "both processes' checkpoints are there", forked_saves),
    Trial("a process forked in mid save saves", "its checkpoint is there, or an error", forked_in_mid_save),
)  # fmt: skip
