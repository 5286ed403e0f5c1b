"""What the trials with several processes share: their form, and what each asks of how a process ended."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stress.child import Outcome


class Skipped(Exception):
    """A trial that cannot be made here, and why."""


@dataclass(frozen=True)
class Trial:
    """Processes in a room of their own; an AssertionError says what was not as it must be."""

    name: str
    must: str
    run: Callable[[Path], None]


def fine(outcome: Outcome, *, warnings: int = 0, words: tuple[str, ...] = ()) -> Any:
    """The result of a process that ended well, with so many warnings at most; each has one of the words."""
    _without_raw_errors(outcome)
    assert not outcome.error, outcome.error
    _warned(outcome, warnings, words)
    return outcome.value


def refused(outcome: Outcome, *words: str, warning: str = "") -> None:
    """The process ended with a named error that has the words, and with no warning, or one such `warning` at most."""
    _without_raw_errors(outcome)
    assert outcome.error, f"no error: {outcome.value}"
    _warned(outcome, 1 if warning else 0, (warning,))
    for word in words:
        assert word in outcome.error, f"no {word!r} in {outcome.error}"


def _warned(outcome: Outcome, most: int, words: tuple[str, ...]) -> None:
    said = "\n  ".join(outcome.warnings)
    assert len(outcome.warnings) <= most, f"{len(outcome.warnings)} warnings:\n  {said}"
    for text in outcome.warnings:
        assert not words or any(word in text for word in words), f"a warning without {words}: {text}"


def _without_raw_errors(outcome: Outcome) -> None:
    assert not outcome.raw_error, f"a raw error:\n{outcome.raw_error}"
    assert "Traceback" not in outcome.stderr, f"on stderr:\n{outcome.stderr}"


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """A disk of its own at an empty folder. `Skipped` for who may not mount one."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise Skipped("needs root, to mount a disk")
    place.mkdir(exist_ok=True)
    done = _mount("-t", "tmpfs", "-o", options, "tmpfs", str(place))
    if done.returncode:
        raise Skipped(f"cannot mount a disk: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def make_read_only(place: Path) -> None:
    """Remount a disk that `mounted` gave."""
    done = _mount("-o", "remount,ro", str(place))
    assert done.returncode == 0, done.stderr


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
