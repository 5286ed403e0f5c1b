"""Signal handlers around a capture: they find what is there, and what they raise goes to the caller as it is.

A handler runs between any two instructions. In the middle of a trace it would find fakes where the state is, and
save those. So it waits until the trace has ended and all is put back. After the trace it runs at once, but its error
comes up in the middle of torch, of sympy, or of an attempt that is made again another way. Each of these takes errors
of any kind for its own: it swallows them, or makes others of them.

Python's own handler of an interrupt never waits, nor does a handler that the step itself has set.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, Final

from monograph.compat.modes import outside_of_modes
from monograph.state.signals import Handler, handlers_by, run_all
from monograph.user_code.files import is_user_file

_OF_TORCH: Final = ("sympy", "mpmath")  # what it computes sizes with


class Heard:
    """What handlers have raised."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def check(self) -> None:
        """Raise the first that nobody but torch or Monograph has caught."""
        for error in self.errors:
            if not _caught_by_user(error):
                raise error

    def listening(self, handler: Handler) -> Handler:
        """The same handler, whose error is kept as well. What it does is no part of what is traced."""

        @wraps(handler)
        def run(number: int, frame: FrameType | None) -> Any:
            try:
                with outside_of_modes():
                    return handler(number, frame)
            except BaseException as error:
                self.errors.append(error)
                raise

        return run


@contextmanager
def handlers_heard() -> Iterator[Heard]:
    """Around a capture: an error that came out of one that a signal handler raised is that one."""
    heard = Heard()
    try:
        with handlers_by(heard.listening):
            yield heard
    except BaseException as error:
        if all(error is not item for item in heard.errors):
            heard.check()
        raise


@contextmanager
def handlers_held_back() -> Iterator[None]:
    """Around a trace: handlers run at its end, each once, as for a signal that the system holds back."""
    waiting: dict[int, Handler] = {}

    def held_back(handler: Handler) -> Handler:
        if inspect.unwrap(handler) is signal.default_int_handler:
            return handler

        def note(number: int, _frame: FrameType | None) -> None:
            waiting[number] = handler

        return note

    try:
        with handlers_by(held_back):
            yield
    finally:
        run_all(list(waiting.items()))


def raised_by_handler(error: BaseException) -> bool:
    """True for an error that a signal handler raised, as far as it is a function."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {
        None
    }
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _caught_by_user(error: BaseException) -> bool:
    """True if the frame that an error was stopped in, the first of its traceback, is of the user's code."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    name = traceback.tb_frame.f_code.co_filename
    return is_user_file(name) and not any(f"{os.sep}{part}{os.sep}" in name for part in _OF_TORCH)
