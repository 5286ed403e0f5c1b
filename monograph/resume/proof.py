"""Two new processes train the same steps, one of them from a checkpoint in between; their bits are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from monograph.checkpoint.save import save
from monograph.errors import CheckpointError, DefinitionError
from monograph.ir.text import Displayed
from monograph.resume.factory import Factory, FactoryError, factory_name

USAGE, MISFIT = 2, 3  # how the other process ends if the factory, or the state, is at fault
_SHOWN = 10


@dataclass(frozen=True)
class Job:
    """What one process does: make the graph, load, train `steps` after skipping `skip` batches, save, train `more`."""

    factory: str
    report: str  # the file for its digests
    load: str | None
    skip: int
    steps: int
    save: str | None
    more: int
    python_random: bool
    threads: tuple[int, int]  # of an op, and between ops
    path: tuple[str, ...]


@dataclass(frozen=True)
class Trail:
    """Digests of the results of each step, and of the state after the last one, by path."""

    results: tuple[Mapping[str, str], ...]
    state: Mapping[str, str]
    registered: bool  # whether the batches go on by a state of their own
    notes: tuple[str, ...] = ()  # what the checkpoint does not hold


@dataclass(frozen=True, repr=False)
class ResumeReport(Displayed):
    """The verdict: what differs between training without a break and training from a checkpoint, in order."""

    steps: int
    more: int
    entries: int
    differences: tuple[str, ...]
    batches_registered: bool = True
    notes: tuple[str, ...] = ()  # what the checkpoint does not hold, where something differs

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        after = f"from the checkpoint after {self.steps} steps"
        if self.ok:
            proven = (
                f"resume proven: {after} the next {self.more} steps give the same bits, "
                f"and so do the {self.entries} entries of the state after them"
            )
            skipped = (
                f"\n  the batches are not registered: the second process began with the first one again and skipped {self.steps}; "
                "your script has to do the same"
            )
            return proven if self.batches_registered else proven + skipped
        shown = [f"  {difference}" for difference in self.differences[:_SHOWN]]
        more = len(self.differences) - len(shown)
        head = f"resume not proven: {after} training goes another way, {len(self.differences)} differences"
        shown += [f"  and {more} more"] if more else []
        if not self.batches_registered:
            shown.append(
                "  hint: batches that draw random numbers go on only if the graph knows them: register_state, and a factory "
                "that returns the registered object itself, not an iterator of it"
            )
        shown += [f"  hint: {note}" for note in self.notes]
        return "\n".join([head, *shown])


def prove_resume(
    factory: str | Factory,
    *,
    start: Mapping[str, Any] | Path | None = None,
    checkpoint: Path | None = None,
    steps: int = 3,
    more: int = 3,
    python_random: bool = False,
) -> ResumeReport:
    """Train `steps` and `more` in a new process, and `more` in another from the checkpoint between them.

    `start` is a state, or where one is saved; without it training starts as the factory makes it. The checkpoint is
    kept if its path is given.
    """
    name = factory_name(factory)
    if steps < 1 or more < 1:
        raise DefinitionError(f"steps={steps} and more={more} prove nothing", hint="both are at least 1")
    with TemporaryDirectory(prefix="monograph-") as folder:
        if isinstance(start, Mapping):
            start = save(start, Path(folder, "start"))
        middle = checkpoint if checkpoint is not None else Path(folder, "checkpoint")

        job = Job(
            name,
            report=str(Path(folder, "report")),
            load=None if start is None else str(start),
            skip=0,
            steps=steps,
            save=str(middle),
            more=more,
            python_random=python_random,
            threads=(torch.get_num_threads(), torch.get_num_interop_threads()),
            path=tuple(sys.path),
        )
        without = _run(job)
        resumed = _run(replace(job, load=str(middle), skip=steps, steps=0, save=None))
    differences = _differences(without, resumed, first=steps + 1)
    notes = without.notes if differences else ()
    return ResumeReport(steps, more, len(without.state), tuple(differences), without.registered, notes)


def _run(job: Job) -> Trail:
    paths = os.pathsep.join(path for path in job.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "monograph.resume"],
        input=json.dumps(asdict(job)),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    message = done.stderr.strip().rpartition("Traceback (most recent call last):")[2].strip()
    what = "resumes" if job.skip else "trains without a break"
    if done.returncode == USAGE:
        raise FactoryError(message.rpartition("\n")[2])
    if done.returncode:
        raise CheckpointError(
            f"the process that {what} failed: {message}", hint="the same factory must make the same graph"
        )
    report = json.loads(Path(job.report).read_text())
    return Trail(tuple(report["results"]), report["state"], report["registered"], tuple(report["notes"]))


def _differences(without: Trail, resumed: Trail, *, first: int) -> list[str]:
    found = []
    for number, (expected, got) in enumerate(zip(without.results, resumed.results, strict=True), first):
        found += [f"step {number}: {path}" for path in _unequal(expected, got)]
    return found + _unequal(without.state, resumed.state)


def _unequal(expected: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    found = []
    for path in dict.fromkeys((*expected, *got)):
        if path not in got:
            found.append(f"{path} (only without a break)")
        elif path not in expected:
            found.append(f"{path} (only resumed)")
        elif expected[path] != got[path]:
            found.append(path)
    return found
