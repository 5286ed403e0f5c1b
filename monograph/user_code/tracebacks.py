"""Tracebacks of errors: who raised one, and what is left of it for the user to read."""

from __future__ import annotations

import dis
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

import torch

from monograph.user_code.files import (
    computes_numbers,
    is_generated,
    is_inside,
    is_torch,
    is_user_file,
    traces,
)

_INTERRUPTED: Final = "interrupted while "


def raised_by_user(error: BaseException) -> bool:
    """True if the user's code raised it by a `raise` of its own, not by an operation that failed."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    raising = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return raising and is_user_file(code.co_filename)


def is_of_eager_mode(error: BaseException) -> bool:
    """True if eager mode raises it too: a `raise` in Python code of torch that traces nothing, or an index that is wrong."""
    frames = _frames(error)
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    own = [index for index, name in enumerate(names) if is_user_file(name)]
    if not own:
        return False
    last = frames[-1]
    instruction = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    if isinstance(error, IndexError) and (instruction.startswith("CALL") or names[-1] == torch.__file__):
        return True  # by C++ of torch, or its kernels for fakes
    inside = [name for name in names[own[-1] + 1 :] if is_torch(name)]
    raised = instruction == "RAISE_VARARGS" and names[-1] in inside
    return raised and all(map(_is_of_torch_alone, inside))


def _is_of_torch_alone(filename: str) -> bool:
    """True for files of torch that do not trace."""
    return filename == torch.__file__ or (is_torch(filename) and not traces(filename))


def _frames(error: BaseException) -> list[TracebackType]:
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def own_frames(error: BaseException) -> list[TracebackType]:
    """The user's frames of an error, and those of what they called that raised it in eager mode too; otherwise none."""
    frames = _frames(error)
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    own = [index for index, name in enumerate(names) if is_user_file(name)]
    if (
        own
        and isinstance(error, (ArithmeticError, ValueError))
        and all(map(computes_numbers, names[own[-1] + 1 :]))
    ):
        return [frames[index] for index in own]  # of the user's own arithmetic, on numbers of ours
    if not own:
        return []
    called = frames[own[-1] + 1 :]
    if isinstance(error, AttributeError) and all(map(_looks_up, called)):
        return [frames[index] for index in own]  # a name that is not there, as Python says it too
    if any(map(is_inside, names[own[-1] :])):
        if not is_of_eager_mode(error):
            return []
        called = [frame for frame in called if _is_of_torch_alone(frame.tb_frame.f_code.co_filename)]
    return [frames[index] for index in own] + called


def _looks_up(frame: TracebackType) -> bool:
    """True for code that Python calls for an attribute that it does not find itself."""
    return frame.tb_frame.f_code.co_name in ("__getattr__", "__getattribute__")


def with_own_frames(error: BaseException) -> BaseException:
    """An error that the user's code raised, with no frames but theirs; any other error as it is.

    An error of an op of a program has no frames: a note has the user's line. With MONOGRAPH_FULL_TRACEBACK set nothing
    is taken away.
    """
    frames = own_frames(error)
    if os.environ.get("MONOGRAPH_FULL_TRACEBACK"):
        return error
    if not frames:
        return error.with_traceback(None) if _is_of_program(error) else error
    if error.__cause__ is error:
        error.__cause__ = None
    return error.with_traceback(_chain(frames))


@contextmanager
def interrupts_say(doing: str) -> Iterator[None]:
    """Around what takes long: an interrupt says what it has interrupted, unless it says something already."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (f"{_INTERRUPTED}{doing}",)
        raise


def after_interrupt(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """An interrupt that says what it has interrupted, with no frames but the user's; any other one as it is."""
    if not str(error).startswith(_INTERRUPTED) or os.environ.get("MONOGRAPH_FULL_TRACEBACK"):
        return error
    error.__suppress_context__ = True  # what torch was handling
    return error.with_traceback(
        _chain(f for f in _frames(error) if is_user_file(f.tb_frame.f_code.co_filename))
    )


def _chain(frames: Iterable[TracebackType]) -> TracebackType | None:
    shown: TracebackType | None = None
    for frame in reversed(list(frames)):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def forget_locals(error: BaseException) -> None:
    """Clear the frames that an error came through, and that have ended: who keeps the error keeps none of their tensors.

    With MONOGRAPH_FULL_TRACEBACK set a debugger finds them all.
    """
    if os.environ.get("MONOGRAPH_FULL_TRACEBACK"):
        return
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            _clear_frames(found.__traceback__)
            pending += [found.__cause__, found.__context__, getattr(found, "cause", None)]


def _clear_frames(traceback: TracebackType | None) -> None:
    while traceback is not None:
        try:
            traceback.tb_frame.clear()
        except RuntimeError:  # it still runs
            pass
        else:
            # a dict that somebody asked for follows only when it is asked for
            _ = traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def _is_of_program(error: BaseException) -> bool:
    """True if an op of a generated function raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        if is_generated(traceback.tb_frame.f_code.co_filename):
            return True
        traceback = traceback.tb_next
    return False
