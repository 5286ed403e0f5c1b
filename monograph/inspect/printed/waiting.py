"""What a compilation does, said once somebody has waited for two seconds: a line in a terminal, log records elsewhere.

The log is `monograph.progress`, at the level INFO; where there is no terminal, a long compilation is a warning, once. With
MONOGRAPH_PROGRESS=0 in the environment nothing is said.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from torch import fx

from monograph.capture.step.observer import Observer
from monograph.ir.meta import origin

LOGGER = logging.getLogger("monograph.progress")
_PATIENCE = 2.0  # seconds without a word
_LINES, _RECORDS = 0.3, 10.0  # seconds between two texts in a terminal, and in a log
_MEANWHILE = {"backend exact": 'config.backend("auto")'}  # what compiles beside the steps
_LONG = 10.0  # seconds of a compilation of which the log speaks aloud


def is_silenced() -> bool:
    """True if nobody wants to know."""
    return os.environ.get("MONOGRAPH_PROGRESS") == "0"


class FootLine:
    """One line at the foot of a terminal, which goes again; nothing elsewhere."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None and _is_terminal(stream) else None
        self._shown = False

    @property
    def is_there(self) -> bool:
        """True if there is a terminal."""
        return self._stream is not None

    def show(self, text: str) -> None:
        """Write a text over the last one."""
        if self._stream is not None:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._shown = True

    def hide(self) -> None:
        """Clear the line."""
        if self._shown and self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = False


def _is_terminal(stream: TextIO) -> bool:
    """True if what is written can be cleared again: not in a file, in a cell of a notebook, or in the shell of an editor.

    A kernel of Jupyter may say that it is a terminal, since it knows colours.
    """
    return stream.isatty() and os.environ.get("TERM") != "dumb" and "ipykernel" not in sys.modules


def _compiles(stage: str) -> bool:
    """True for a stage that runs a compiler."""
    return stage.startswith("backend ") and stage != "backend aten"


class Waiting(Observer):
    """Says what is being done, and how far it is."""

    def __init__(self, name: str, number: int = 0) -> None:
        # everybody waits for the first one
        self._name = f"{name}: build {number}" if number else name
        self._start = time.monotonic()
        self._next = self._start + _PATIENCE
        self._doing, self._detail, self._count = "", "", 0
        self._line = FootLine(sys.stderr)
        self._aloud = self._start + _LONG

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say so while it lasts; the compiler has a thread beside it, since it reports nothing for a long time."""
        self._doing, self._detail = name, ""
        self._look()
        over = threading.Event()
        ticker = None
        if _compiles(name):
            ticker = threading.Thread(target=self._tick, args=(over,), daemon=True, name="monograph progress")
            ticker.start()
        try:
            yield
        finally:
            over.set()
            if ticker is not None:
                ticker.join()
            self._line.hide()

    def op(self, node: fx.Node) -> None:
        """An op is recorded."""
        self._count += 1
        if time.monotonic() >= self._next:
            module = origin(node).module
            self._detail = f"{self._count} ops, in {module or 'build()'}"
            self._look()

    def progress(self, detail: str) -> None:
        """A stage has come so far."""
        self._detail = detail
        self._look()

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(_LINES):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next or not self._doing:
            return
        self._next = now + (_LINES if self._line.is_there else _RECORDS)
        detail = f", {self._detail}" if self._detail else ""
        text = f"{self._name}: {self._doing}{detail}, {now - self._start:.0f} s"
        self._line.show(text)
        LOGGER.log(logging.DEBUG if self._line.is_there else logging.INFO, text)
        if _compiles(self._doing) and now >= self._aloud and not self._line.is_there:
            self._aloud = math.inf
            LOGGER.warning(
                "%s: the step has waited %.0f s so far for its compilation; %s trains meanwhile, and a later run finds the code in "
                "the cache",
                self._name,
                now - self._start,
                _MEANWHILE.get(self._doing, "background=True in config.backend()"),
            )
