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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import compress
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


class Hold:
    """Whether handlers wait. Setting it is one instruction, which nothing divides."""

    __slots__ = ("on",)

    def __init__(self, *, on: bool = False) -> None:
        self.on = on


@contextmanager
def interruptible(*, on: bool = False) -> Iterator[Hold]:
    """Inside, handlers run as always until `hold.on` is set. From then on they wait for the end, and run there, once.

    Set it as the last thing that may be undone, and as the first in an `except` before what undoes it.
    """
    hold, waiting = Hold(on=on), dict[int, Handler]()

    def around(handler: Handler) -> Handler:
        def run(number: int, frame: FrameType | None) -> Any:
            if not hold.on:
                return handler(number, frame)
            waiting[number] = handler
            return None

        run.__wrapped__ = handler  # type: ignore[attr-defined]  # what looks through those around a handler asks for it
        return run

    before = python_handlers()
    ours = {number: around(handler) for number, handler in before.items()}
    try:
        try:
            try:
                for number, handler in ours.items():
                    _signal.signal(number, handler)
                yield hold
            finally:
                hold.on = True  # until all are back in their places
        finally:
            _put_back(before, ours)
    finally:
        hold.on = False
        run_all(list(waiting.items()))


# Inside, handlers wait for the end.
held_back: Final[Callable[[], AbstractContextManager[Hold]]] = partial(interruptible, on=True)


@contextmanager
def handlers_by(around: Callable[[Handler], Handler]) -> Iterator[None]:
    """Inside, `around(handler)` takes the place of each handler in Python."""
    before = python_handlers()
    ours = {number: around(handler) for number, handler in before.items()}
    try:
        for number, handler in ours.items():
            _signal.signal(number, handler)
        yield
    finally:
        _put_back(before, ours)


def python_handlers() -> dict[int, Handler]:
    """Those that this thread may replace, by signal. C looks at all, since a step asks and there are 60 signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = list(map(_signal.getsignal, _SIGNALS))
    found = compress(zip(_SIGNALS, handlers, strict=True), map(callable, handlers))
    return {number: handler for number, handler in found if not isinstance(handler, signal.Handlers)}


def _put_back(before: dict[int, Handler], ours: dict[int, Handler]) -> None:
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
