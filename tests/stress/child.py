"""A forked process that tells its parent where it is, and what became of it: its result or error, and its warnings."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import monograph as mg

LONGEST_SECONDS = 150.0


class Lost(AssertionError):
    """A process that did not do in time what a trial waits for."""


@dataclass(frozen=True)
class Outcome:
    """The end of a process."""

    value: Any = None
    error: str = ""  # one of ours, as "CheckpointError: cannot save ..."
    raw_error: str = ""  # the traceback of any other
    warnings: tuple[str, ...] = ()  # of Python, and what Monograph logs as one
    stderr: str = ""


class Child:
    """A process that runs a function of its own `Parent`, in a process group of its own.

    At the end of a `with` block the group is killed, with the compilers that it has started.
    """

    def __init__(self, run: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._connection, theirs = Pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._outcome: Outcome | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _live(Parent(theirs), self._stderr.fileno(), run, args, options)
        os.setpgid(self.pid, self.pid)
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._connection.close()
        self._stderr.close()

    def hear(self, expected: str) -> Any:
        """What it says under this word; what it said before under others is forgotten."""
        while (said := self._receive(f"to hear {expected!r}"))[0] != expected:
            if said[0] == "end":
                self._outcome = said[1]
                raise Lost(f"it ended before {expected!r}: {said[1]}")
        return said[1]

    def answer(self) -> None:
        """Let it go on behind `Parent.ask`."""
        self._connection.send(None)

    def has_stopped(self) -> None:
        """Wait until it has stopped itself."""
        self.hear("stops")
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def signal(self, number: signal.Signals, *, with_compilers: bool = False) -> None:
        """Send a signal to it, or to all of its group as a terminal does."""
        (os.killpg if with_compilers else os.kill)(self.pid, number)

    def outcome(self, *, seconds: float = LONGEST_SECONDS) -> Outcome:
        """How it ended, when it has ended by itself."""
        while self._outcome is None:
            word, value = self._receive("for its end", seconds)
            if word == "end":
                self._outcome = value
        self._stderr.seek(0)
        return Outcome(**{**vars(self._outcome), "stderr": self._stderr.read().decode(errors="replace")})

    def _receive(self, why: str, seconds: float = LONGEST_SECONDS) -> tuple[str, Any]:
        if not self._connection.poll(seconds):
            raise Lost(f"waited {seconds:.0f} s {why}")
        try:
            word, value = self._connection.recv()
        except EOFError:
            raise Lost(f"it died, waiting {why}") from None
        return word, value


@dataclass(frozen=True)
class Parent:
    """What a child says to its parent."""

    connection: Connection

    def tell(self, word: str, value: Any = None) -> None:
        """Say something."""
        self.connection.send((word, value))

    def ask(self, word: str) -> None:
        """Say something, and wait until the parent has done what it wants to do now."""
        self.tell(word)
        self.connection.recv()

    def stop(self) -> None:
        """Stop as `kill -STOP` does it, until somebody sends SIGCONT."""
        self.tell("stops")
        os.kill(os.getpid(), signal.SIGSTOP)

    def is_waiting(self) -> bool:
        """True until the parent has answered."""
        return not self.connection.poll()


class _Records(logging.Handler):
    """The warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _live(
    parent: Parent, stderr: int, run: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    error = raw_error = ""
    value, records = None, _Records()
    logging.getLogger("monograph").addHandler(records)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = run(parent, *args, **options)
        except mg.MonographError as found:
            error = f"{type(found).__name__}: {found}"
        except BaseException:
            raw_error = traceback.format_exc()
    texts = [str(item.message) for item in caught] + records.texts
    parent.tell("end", Outcome(value, error, raw_error, tuple(texts)))
    sys.stderr.flush()
    os._exit(0)
