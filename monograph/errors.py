"""The exception tree, and `Origin`: the place in the user's code an error or an op comes from.

MonographError
├── DefinitionError (AttributeError)      a Graph class is written wrongly
│   └── MissingBuildError (NotImplementedError)
├── CaptureError                          build() cannot become a static graph
│   ├── DataDependentError                Python asked for the value of a tensor
│   ├── HookError                         a hook that cannot be carried over
│   ├── AliasError                        tensors that share memory in a way that replay would break
│   ├── OptimizerError                    an optimizer that cannot be captured or is not used rightly
│   └── UnsupportedTensorError            quantised, subclass or inference-mode tensors, wrapped modules
├── SignatureError                        a call does not fit: shape, dtype, device, count or type
├── GraphBoundaryError                    autograd history crosses the boundary of a graph, in or out
├── PassError                             a program breaks a rule, or a pass failed
├── PlanError                             a plan reads what is no longer there
├── BackendError                          a backend cannot lower or run a program
│   └── TornStateError                    a compiled step failed when it had begun to change the state
├── DistributedError                      more processes, or devices, than there are
├── UnavailableError (ImportError)        a name of another library that has no counterpart here
├── NonfiniteError                        a step made a NaN or an infinity, and its state was not taken over
├── CheckpointError                       state that cannot be saved or loaded
├── ArtifactError                         a graph that cannot be deployed, or is no artifact
└── DatasetError                          files of a data set that are missing or damaged
"""

from __future__ import annotations

import copyreg
import dis
import os
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_MACHINERY = (_INSIDE[1], *(_INSIDE[0] + name for name in ("fx", "_", "utils", "overrides")))  # of tracing
_GENERATED = "<monograph"
_LIBRARY_FILES = ("<frozen", "<string>", "<eval_with_key>", _GENERATED)
_COMMAND_LINES = (f"{os.sep}typer{os.sep}", f"{os.sep}click{os.sep}")  # what runs the user's code
_LIBRARY_NAMES = (f"{os.sep}bin{os.sep}monograph",)  # the command
_NUMBERS = tuple(
    _INSIDE[1] + os.path.join("capture", "numbers", f"{name}.py")
    for name in ("arithmetic", "moving", "protocol", "python_functions")
)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Frame(NamedTuple):
    """A line of code that was running."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function!r} at {os.path.basename(self.file)!r}: line {self.line}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something comes from: the user's file and line, the module path and the phase of the step."""

    file: str = ""
    line: int = 0
    module: str = ""
    phase: str = ""
    # of the code that was running, innermost first, if it was asked for
    stack: tuple[Frame, ...] = field(default=(), compare=False, repr=False)

    def is_in(self, module: str) -> bool:
        """True for a module and for those inside of it."""
        return self.module == module or self.module.startswith(f"{module}.")

    def __str__(self) -> str:
        place = f"{os.path.basename(self.file)}:{self.line}" if self.file else ""
        module = f"in module {self.module}" if self.module else ""
        return " ".join(part for part in (place, module, f"({self.phase})" if self.phase else "") if part)


class MonographError(Exception):
    """Base of every error that Monograph raises for a user's mistake or a limit.

    `where` is the place in the user's code, the innermost line of theirs if not given; `hint` what to do next.
    """

    def __init__(self, message: str, *, where: Origin | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where if where is not None else user_place(sys._getframe(1))
        self.hint = hint
        self.cause: BaseException | None = None  # what it came from, once this error is brief

    def brief(self) -> Self:
        """Itself without the frames of torch and Monograph, so that what Python prints of it is short.

        What it came from is at `cause` then. With MONOGRAPH_FULL_TRACEBACK set, nothing is taken away.
        """
        if os.environ.get("MONOGRAPH_FULL_TRACEBACK"):
            return self
        self.cause = self.cause or self.__cause__
        self.__cause__, self.__suppress_context__ = None, True
        return self.with_traceback(None)

    def __str__(self) -> str:
        place = (
            f'\n  at "{self.where.file}", line {self.where.line}' if self.where and self.where.file else ""
        )
        module = f"\n  in module {self.where.module}" if self.where and self.where.module else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.message}{place}{module}{hint}"


class DefinitionError(MonographError, AttributeError):
    """A Graph class is written wrongly."""


class MissingBuildError(DefinitionError, NotImplementedError):
    """A Graph subclass does not override `build`."""


class CaptureError(MonographError):
    """`build()` cannot become a static graph."""


_KINDS = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    ArithmeticError,
)
_CAPTURE_ERRORS: dict[type[Exception], type[CaptureError]] = {
    kind: type(CaptureError.__name__, (CaptureError, kind), {"__module__": __name__}) for kind in _KINDS
}


def capture_error_of(error: Exception) -> type[CaptureError]:
    """A CaptureError that `except` clauses for the error of eager mode catch as well."""
    return next((made for kind, made in _CAPTURE_ERRORS.items() if isinstance(error, kind)), CaptureError)


def is_named(error: MonographError) -> bool:
    """True for an error whose class says more than that a capture has failed."""
    return type(error) is not CaptureError and type(error) not in _CAPTURE_ERRORS.values()


def _reduced(error: CaptureError) -> tuple[Any, ...]:
    return _restored, (type(error).__bases__[1], error.args, error.__dict__)


def _restored(kind: type[Exception], args: tuple[Any, ...], content: dict[str, Any]) -> CaptureError:
    error = _CAPTURE_ERRORS[kind](*args)
    error.__dict__.update(content)
    return error


for _made in _CAPTURE_ERRORS.values():  # they have no names of their own
    copyreg.pickle(_made, _reduced)


class DataDependentError(CaptureError):
    """Python asked for the value of a tensor during capture."""


class HookError(CaptureError):
    """A hook that cannot be carried into the graph."""


class AliasError(CaptureError):
    """Tensors share memory in a way that replay would break."""


class OptimizerError(CaptureError):
    """An optimizer that cannot be captured, or is not used rightly."""


class UnsupportedTensorError(CaptureError):
    """A kind of tensor or module that a static graph cannot contain."""


class SignatureError(MonographError):
    """The arguments of a call do not fit."""


class GraphBoundaryError(MonographError):
    """A tensor with autograd history crosses the boundary of a graph, in either direction."""


class PassError(MonographError):
    """A program breaks a rule, or a pass failed."""


class PlanError(MonographError):
    """A plan reads a value that is no longer there."""


class BackendError(MonographError):
    """A backend cannot lower or run a program."""


class TornStateError(BackendError):
    """A compiled step failed when it had begun to change parameters: part of the state is old, part is new."""


class NonfiniteError(MonographError):
    """A step made a NaN or an infinity; with `config.detect_nonfinite()` the state is that of before it."""


class DistributedError(MonographError):
    """Something asks for more processes or devices than there are."""


class UnavailableError(MonographError, ImportError):
    """A name of another library that has no counterpart here; the hint says what to use instead."""


class CheckpointError(MonographError):
    """State that cannot be saved or loaded; what was there before is unharmed."""


class ArtifactError(MonographError):
    """A graph cannot be deployed, or what is loaded is no artifact that `save` wrote."""


class DatasetError(MonographError):
    """Files of a data set are missing or damaged."""


def is_inside(filename: str) -> bool:
    """True for files of torch and of Monograph."""
    return filename.startswith(_INSIDE)


@cache  # asked for each frame that an op comes from, and for each module at a capture
def is_user_file(filename: str) -> bool:
    """True for files outside torch, Monograph and the interpreter's own plumbing."""
    return not (
        filename.startswith(_INSIDE)
        or filename.startswith(_LIBRARY_FILES)
        or filename.endswith(_LIBRARY_NAMES)
        or any(name in filename for name in _COMMAND_LINES)
        or (filename.startswith(_STANDARD) and not any(name in filename for name in _INSTALLED))
    )


@cache
def is_installed_file(filename: str) -> bool:
    """True for files of packages that were installed, which the user has not written."""
    return any(name in filename for name in _INSTALLED)


def user_place(frame: FrameType | None = None) -> Origin:
    """The innermost user line on the stack of `frame`, by default the caller's."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return Origin(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return Origin()


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
        if is_user_file(code.co_filename) or not (only_user or code.co_filename.startswith(_MACHINERY)):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


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
    inside = [name for name in names[own[-1] + 1 :] if name.startswith(_INSIDE[0])]
    raised = instruction == "RAISE_VARARGS" and names[-1] in inside
    return raised and all(map(_is_public, inside))


def _is_public(filename: str) -> bool:
    """True for files of torch that do not trace."""
    return filename == torch.__file__ or (
        filename.startswith(_INSIDE[0]) and not filename.startswith(_MACHINERY)
    )


def _frames(error: BaseException) -> list[TracebackType]:
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _computes(filename: str) -> bool:
    """True for the files that do Python's arithmetic on numbers that move."""
    return filename in _NUMBERS


def own_frames(error: BaseException) -> list[TracebackType]:
    """The user's frames of an error, and those of what they called that raised it in eager mode too; otherwise none."""
    frames = _frames(error)
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    own = [index for index, name in enumerate(names) if is_user_file(name)]
    if own and isinstance(error, (ArithmeticError, ValueError)) and all(map(_computes, names[own[-1] + 1 :])):
        return [frames[index] for index in own]  # of the user's own arithmetic, on numbers of ours
    if not own:
        return []
    called = frames[own[-1] + 1 :]
    if any(name.startswith(_INSIDE) for name in names[own[-1] :]):
        if not is_of_eager_mode(error):
            return []
        called = [frame for frame in called if _is_public(frame.tb_frame.f_code.co_filename)]
    return [frames[index] for index in own] + called


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
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(shown)


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
            _ = (
                traceback.tb_frame.f_locals
            )  # a dict that somebody asked for follows only when it is asked for
        traceback = traceback.tb_next


def _is_of_program(error: BaseException) -> bool:
    """True if an op of a generated function raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith(_GENERATED):
            return True
        traceback = traceback.tb_next
    return False


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
