"""Signal handlers that wait while state is written or put back, as for signals that the system holds back.

A handler in Python runs between any two instructions of the main thread, and Python's own raises KeyboardInterrupt there.
A mask of the system would not do: it holds for one thread, and a signal to the process finds another that takes it.
In other threads than the main one no handler runs, and nothing here does anything.

A step that a build serves holds signals back only while it changes state op by op: elsewhere an interrupt is met when it
comes (`Executor.run`).
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, Final, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

# The functions in C without those of Python around them, which look each handler up in an enumeration: 1 µs instead of 70
# for all signals. Without that module they are Python's.
try:
    _signal: Any = importlib.import_module("_signal")
except ImportError:
    _signal = signal
_SIGNALS: Final = tuple(sorted(map(int, signal.valid_signals())))


@dataclass
class Hold:
    """Whether handlers wait. Setting it is one instruction, which nothing divides."""

    on: bool = False


@contextmanager
def interruptible() -> Iterator[Hold]:
    """Inside, handlers run as always until `hold.on` is set. From then on they wait for the end, and run there, once.

    Set it as the last thing that may be undone, and as the first in an `except` before what undoes it.
    """
    hold, waiting = Hold(), dict[int, Handler]()

    def around(handler: Handler) -> Handler:
        @wraps(handler)
        def run(number: int, frame: FrameType | None) -> Any:
            if not hold.on:
                return handler(number, frame)
            waiting[number] = handler
            return None

        return run

    try:
        with handlers_by(around):
            try:
                yield hold
            finally:
                hold.on = True  # until all are back in their places
    finally:
        hold.on = False
        run_all(list(waiting.items()))


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, handlers wait for the end."""
    with interruptible() as hold:
        hold.on = True
        yield


@contextmanager
def handlers_by(around: Callable[[Handler], Handler]) -> Iterator[None]:
    """Inside, `around(handler)` takes the place of each handler in Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True)
    before: dict[int, Any] = {number: handler for number, handler in handlers if _is_python(handler)}
    ours = {number: around(handler) for number, handler in before.items()}
    try:
        for number, handler in ours.items():
            _signal.signal(number, handler)
        yield
    finally:
        for number, handler in ours.items():
            if _signal.getsignal(number) is handler:  # else the step has set another
                _signal.signal(number, before[number])


def run_all(waiting: list[tuple[int, Handler]]) -> None:
    """Each of them, also after one that raises. They get the frame that is there now: that of before has ended."""
    if waiting:
        (number, handler), *others = waiting
        try:
            handler(number, sys._getframe())
        finally:
            run_all(others)


def _is_python(handler: object) -> bool:
    return callable(handler) and not isinstance(handler, signal.Handlers)
