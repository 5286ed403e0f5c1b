"""What a signal handler raises goes to the caller as it is, whatever code it meets on its way.

A handler runs between any two instructions, so its error comes up in the middle of torch, of sympy, or of an attempt
that is made again another way. Each of these takes errors of any kind for its own: it swallows them, or makes others
of them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from monograph.errors import is_user_file

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

    def listening(self, handler: Any) -> Callable[..., Any]:
        """The same handler, whose error is kept as well."""

        def run(number: int, frame: FrameType | None) -> Any:
            try:
                return handler(number, frame)
            except BaseException as error:
                self.errors.append(error)
                raise

        return run


@contextmanager
def handlers_heard() -> Iterator[Heard]:
    """Around a capture: an error that came out of one that a signal handler raised is that one."""
    heard = Heard()
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
        yield heard
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    ours = {number: heard.listening(handler) for number, handler in before.items() if _is_python(handler)}
    try:
        for number, listening in ours.items():
            signal.signal(number, listening)
        yield heard
    except BaseException as error:
        if all(error is not item for item in heard.errors):
            heard.check()
        raise
    finally:
        for number, listening in ours.items():
            if signal.getsignal(number) is listening:  # else the step has set another
                signal.signal(number, before[number])


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


def _is_python(handler: object) -> bool:
    return callable(handler) and not isinstance(handler, signal.Handlers)


def _caught_by_user(error: BaseException) -> bool:
    """True if the frame that an error was stopped in, the first of its traceback, is of the user's code."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    name = traceback.tb_frame.f_code.co_filename
    return is_user_file(name) and not any(f"{os.sep}{part}{os.sep}" in name for part in _OF_TORCH)
