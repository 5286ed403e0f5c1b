"""The line of the user's that something comes from: on a stack, or that an error went through."""

from __future__ import annotations

import linecache
import os
import re
import sys
import warnings
from collections.abc import Container
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import NamedTuple

from monograph.user_code.files import calls_steps, is_installed_file, is_user_file, traces


class Frame(NamedTuple):
    """A line of code that was running."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function!r} at {os.path.basename(self.file)!r}: line {self.line}"


_MAKES_TEXT = re.compile(r"""\b[rR]?[fF][rR]?["']|\.format\(|\b(?:str|repr|print)\(|["'] %""")
_USES_TEXT = re.compile(r"""\b(?:float|int|len|getattr)\(\s*(?:[rRfF]{1,2}["']|str\()""")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something comes from: the user's file and line, the module path and the phase of the step."""

    file: str = ""
    line: int = 0
    module: str = ""
    phase: str = ""
    # of the code that was running, innermost first, if it was asked for
    stack: tuple[Frame, ...] = field(default=(), compare=False, repr=False)
    # the region of activation checkpointing that it is in, by number; 0 for none
    region: int = field(default=0, compare=False, repr=False)
    again: bool = field(default=False, compare=False, repr=False)  # computed again, in backward
    gradient_of: str = field(
        default="", compare=False, repr=False
    )  # in backward the op that is differentiated

    def is_in(self, module: str) -> bool:
        """True for a module and for those inside of it."""
        return self.module == module or self.module.startswith(f"{module}.")

    @property
    def place(self) -> str:
        """The name of the file and the line, empty if they are not known."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        module = f"in module {self.module}" if self.module else ""
        return " ".join(
            part for part in (self.place, module, f"({self.phase_text})" if self.phase else "") if part
        )

    @property
    def phase_text(self) -> str:
        """The phase, and whether it is computed a second time."""
        return f"{self.phase}, again" if self.again else self.phase


def user_place(frame: FrameType | None = None) -> Origin:
    """The innermost user line on the stack of `frame`, by default the caller's."""
    return Origin(*user_line(frame or sys._getframe(1)))


def calling_place(frame: FrameType | None = None) -> Origin:
    """The line that calls us or a framework: the innermost user line in no installed package, if there is one.

    The stack is that of `frame`, by default the caller's.
    """
    frame = frame or sys._getframe(1)
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if is_user_file(file) and not is_installed_file(file):
            return Origin(file, found.f_lineno)
        found = found.f_back
    return user_place(frame)


def step_place(frame: FrameType | None = None) -> Origin:
    """The innermost user line of the step that runs; if no line of it is on the stack, as `calling_place`."""
    inner = frame = frame or sys._getframe(1)
    while inner is not None and not calls_steps(inner.f_code.co_filename):
        if is_user_file(inner.f_code.co_filename):
            return Origin(inner.f_code.co_filename, inner.f_lineno)
        inner = inner.f_back  # type: ignore[assignment]
    return calling_place(frame)


def warn_at_user_line(message: str) -> None:
    """A UserWarning for the user's code, at its line."""
    place = calling_place()
    warnings.warn_explicit(message, UserWarning, place.file or "monograph", place.line or 1)


def user_line(frame: FrameType | None) -> tuple[str, int]:
    """The file and the number of the innermost user line on a stack; "" and 0 if there is none."""
    while frame is not None:
        if is_user_file(file := frame.f_code.co_filename):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def frame_behind(passing: Container[str]) -> FrameType | None:
    """The innermost frame of those that called the caller which is not in one of the files `passing`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in passing:
        frame = frame.f_back
    return frame


def asker(passing: Container[str]) -> Origin:
    """The line of the innermost frame that is not in one of the files `passing`; an empty Origin if not the user's."""
    frame = frame_behind(passing)
    return user_place(frame) if frame is not None and is_user_file(frame.f_code.co_filename) else Origin()


def user_place_in_backward(frame: FrameType | None) -> Origin | None:
    """The user's line that autograd has called: in the backward of a function of theirs, or in a hook."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if is_user_file(frame.f_code.co_filename):
            return Origin(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return None


def stack_of(frame: FrameType | None, depth: int, *, only_user: bool) -> tuple[Frame, ...]:
    """The innermost lines on a stack, at most `depth`; with `only_user` none of torch. What traces is left out."""
    found: list[Frame] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if is_user_file(code.co_filename) or not (only_user or traces(code.co_filename)):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def source_of(place: Origin) -> str:
    """The text of a line; empty if its file is not there."""
    return linecache.getline(place.file, place.line).strip() if place.file else ""


def makes_text(place: Origin) -> bool:
    """True for a line that makes a text of values, or prints them, and does not compute with the text."""
    line = source_of(place)
    return _MAKES_TEXT.search(line) is not None and _USES_TEXT.search(line) is None


def user_place_of(error: BaseException) -> Origin:
    """The innermost user line that an exception passed through."""
    place = Origin()
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_user_file(filename):
            place = Origin(file=filename, line=traceback.tb_lineno)
        traceback = traceback.tb_next
    return place
