"""Kills a training process while it saves: afterwards the newest complete checkpoint is one that a save wrote, whole.

Run `OMP_NUM_THREADS=1 .venv/bin/python -m tests.stress.kill_during_save --trials 200`; the tests run 30. The trials at
random times come on top of one kill before, behind and, for writes, inside each call of a save.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import monograph as mg
from monograph.checkpoint.manifest import from_bytes
from tests.checkpoint.same import difference
from tests.checkpoint.system_calls import count_calls, watched

STEPS = 40
LONGEST_SECONDS = 0.03  # some saves, on a slow disk one
PHASES = ("before", "inside", "after")
WAYS = ("overwrite", "manager", "asynchronous")


class Training:
    """A small training whose every step depends on the one before, and on the random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 9, 27])
        self.step = 0

    def advance(self) -> None:
        """One step."""
        loss = self.model(torch.randn(4, 8)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]


@dataclass
class Kill:
    """When a child dies: by itself at a call of a save, or by its parent some time after it told of a step."""

    save: int = 0
    call: int = 0
    phase: str = ""
    told: int = 0
    seconds: float = 0.0


@dataclass
class Report:
    """What the trials saw."""

    kills: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    behind: Counter[int] = field(
        default_factory=Counter
    )  # by how many steps a checkpoint is newer than the last told


def the_uninterrupted_run() -> list[dict[str, Any]]:
    """The state after each step."""
    training = Training()
    trail = [clone(training.state_dict())]
    for _ in range(STEPS):
        training.advance()
        trail.append(clone(training.state_dict()))
    return trail


def clone(value: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        copied = type(value)((key, clone(item)) for key, item in value.items())
        vars(copied).update(vars(value)) if hasattr(value, "_metadata") else None
        return copied
    return [clone(item) for item in value] if isinstance(value, list) else value


# --- the child -------------------------------------------------------------------------------------------------


class Saved(Protocol):
    """What a saver takes."""

    @property
    def step(self) -> int:
        """How far it is."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""


def saver(way: str, directory: Path, *, wait: bool, keep: int = 2) -> Callable[[Saved], int]:
    """What saves a training, and returns the last step whose save is known to be done."""
    if way == "overwrite":
        return lambda training: (
            mg.save(training.state_dict(), directory / "last", overwrite=True) and training.step
        )
    manager = mg.CheckpointManager(directory, keep=keep, asynchronous=way == "asynchronous")

    def save(training: Saved) -> int:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).* is left out")  # steps are fast here
            manager.save(training.state_dict(), step=training.step)
        if wait:
            manager.wait()
        if wait or way == "manager":
            return training.step
        return newest_step(directory)

    return save


def newest_step(directory: Path) -> int:
    """The highest step that has a checkpoint, 0 if there is none."""
    return max((int(path.name.partition("-")[2]) for path in directory.glob("step-*")), default=0)


def child(way: str, directory: Path, kill: Kill, told: int) -> None:
    """Train, save at each step, tell which save is done; die as told."""
    save, training, tell = saver(way, directory, wait=kill.save > 0), Training(), os.write
    for number in range(1, STEPS + 1):
        training.advance()
        with watched(*death(kill)) if number == kill.save else nullcontext():
            done = save(training)
        tell(told, bytes([done]))
    deadline = time.monotonic() + 60
    while kill.seconds and time.monotonic() < deadline:  # a parent that was held up kills it here
        time.sleep(0.01)
        if way == "asynchronous" and (
            done := newest_step(directory)
        ):  # on a slow disk saves end later than steps
            tell(told, bytes([done]))


def death(kill: Kill) -> tuple[Callable[..., None], Callable[[int, str], None]]:
    """What kills before, inside or behind a call."""
    write = os.write

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == kill.call and kill.phase == "before":
            die()
        if number == kill.call and kill.phase == "inside":
            if name == "write":
                write(args[0], bytes(args[1])[: len(args[1]) // 2])
            die()

    def after(number: int, _name: str) -> None:
        if number == kill.call and kill.phase == "after":
            die()

    return before, after


def die() -> None:
    """As `kill -9` does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


# --- the parent ------------------------------------------------------------------------------------------------


def killed_run(way: str, directory: Path, kill: Kill) -> tuple[int, bool]:
    """Run a child until it dies: the last step that it told to be saved, and whether it was killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            child(way, directory, kill, writing)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        os._exit(0)
    os.close(writing)
    last = 0
    if kill.seconds:
        while last < kill.told and (told := os.read(reading, 1)):
            last = told[0]
        time.sleep(kill.seconds)
        os.kill(process, signal.SIGKILL)
    while told := os.read(reading, 4096):
        last = told[-1]
    os.close(reading)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, "the child failed"
    return last, os.WIFSIGNALED(status)


def check(way: str, directory: Path, last: int, trail: list[dict[str, Any]], what: str) -> int:
    """The newest checkpoint is a saved state, not older than the last that was told, and training goes on from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a manager that skips one would warn
        newest = directory / "last" if way == "overwrite" else mg.CheckpointManager(directory).latest()
    if newest is None or not newest.exists():
        assert last == 0, f"{what}: no checkpoint, but step {last} was saved"
        return 0
    loaded = mg.load(newest)
    step = loaded["step"]
    assert step >= last, f"{what}: step {step} is older than {last}, which was saved"
    found = difference(trail[step], dict(loaded))
    assert found is None, f"{what}: step {step} is not what was saved: {found}"
    training = Training()
    training.load_state_dict(loaded)
    goal = min(step + 2, STEPS)
    while training.step < goal:
        training.advance()
    found = difference(trail[goal], training.state_dict())
    assert found is None, f"{what}: resumed at {step}, then not as without a kill: {found}"
    training.advance()
    saver(way, directory, wait=True)(training)  # and the next save tidies up
    others = [name for name in os.listdir(directory) if name.startswith(".")]
    assert others == [], f"{what}: left behind: {others}"
    if way == "overwrite":
        used = {file.name for file in from_bytes((newest / "manifest.json").read_bytes()).files}
        assert set(os.listdir(newest)) == {"manifest.json"} | used, (
            f"{what}: left behind in {os.listdir(newest)}"
        )
    return step - last


def sweep(trail: list[dict[str, Any]], ways: tuple[str, ...], save: int, stride: int = 1) -> Report:
    """Kill at each call of a child's n-th save, in each way and phase; with a stride at each so many-th."""
    report = Report()
    for way in ways:
        with tempfile.TemporaryDirectory() as root:
            calls = calls_of_a_save(way, Path(root), save)
        points = [(call, phase) for call in range(1, calls + 1) for phase in PHASES]
        report.calls[way] = calls
        for call, phase in points[::stride]:
            trial(way, Kill(save=save, call=call, phase=phase), trail, report)
    return report


def calls_of_a_save(way: str, directory: Path, save: int, *, keep: int = 2) -> int:
    """How many calls there are to die at."""
    training, function = Training(), saver(way, directory, wait=True, keep=keep)
    for _ in range(save - 1):
        training.advance()
        function(training)
    training.advance()
    return count_calls(lambda: function(training))


def at_random(trials: int, trail: list[dict[str, Any]], seed: int) -> Report:
    """Kill at random times behind the first save, in the three ways in turn."""
    choice, report = random.Random(seed), Report()
    for number in range(trials):
        kill = Kill(told=choice.randint(1, STEPS // 3), seconds=choice.uniform(1e-6, LONGEST_SECONDS))
        trial(WAYS[number % len(WAYS)], kill, trail, report)
    return report


def trial(way: str, kill: Kill, trail: list[dict[str, Any]], report: Report) -> None:
    """One child and its death."""
    with tempfile.TemporaryDirectory() as root:
        last, killed = killed_run(way, Path(root), kill)
        assert killed, f"{way}, {kill}: it lived"
        report.behind[check(way, Path(root), last, trail, f"{way}, {kill}")] += 1
    report.kills += 1


def show(title: str, report: Report) -> None:
    """One line."""
    newer = ", ".join(
        f"{count} with a checkpoint {steps} newer" for steps, count in sorted(report.behind.items())
    )
    calls = "".join(f"; {count} calls in {way}" for way, count in report.calls.items())
    print(
        f"{title}: {report.kills} kills, none lost or mixed a checkpoint ({newer} than the last told){calls}"
    )


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1, help="kill at each so many-th call only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trail = the_uninterrupted_run()
    show("at random times", at_random(options.trials, trail, options.seed))
    show("at each call of a first save", sweep(trail, WAYS, 1, options.stride))
    show("at each call of a fourth save", sweep(trail, WAYS, 4, options.stride))


if __name__ == "__main__":
    main()
