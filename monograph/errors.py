"""The exception tree.

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
├── PlanError                             a plan reads what is no longer there, or a step does not fit into its budget
├── BackendError                          a backend cannot lower or run a program
│   └── TornStateError                    a compiled step failed when it had begun to change the state
├── DistributedError                      a rank is gone, late or deviates; more processes or devices than there are
├── UnavailableError (ImportError)        a name of another library that has no counterpart here
├── NonfiniteError                        a step made a NaN or an infinity, and its state was not taken over
├── CheckpointError                       state that cannot be saved or loaded
├── ArtifactError                         a graph that cannot be deployed, or is no artifact
└── DatasetError                          files of a data set that are missing or damaged
"""

from __future__ import annotations

import copyreg
import os
import sys
from difflib import get_close_matches
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from monograph.renamed import renamed_class
from monograph.user_code.lines import Origin, calling_place, step_place


def __getattr__(name: str) -> Any:  # for pickles
    return renamed_class(__name__, name)


def no_attribute(owner: object, name: str, hint: str = "") -> AttributeError:
    """The error for a name that an object does not have, with the names near it that it has, or what to do instead."""
    near: list[str] = []
    if not name.startswith("_"):  # Python and libraries ask for those
        known = {*dir(type(owner)), *vars(owner)}
        near = get_close_matches(name, [item for item in known if not item.startswith("_")], n=2)
    said = hint or (f"did you mean {' or '.join(map(repr, near))}?" if near else "")
    text = f"{type(owner).__name__!r} object has no attribute {name!r}{': ' if said else ''}{said}"
    return AttributeError(text, name=name, obj=owner)


class NamesNear:
    """An object whose AttributeError names the attributes that may have been meant."""

    if not TYPE_CHECKING:  # a checker knows the attributes that there are

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)


def hint_line(hint: str) -> str:
    """What to do next, on a line of its own below what has happened; empty if there is no hint."""
    return f"\n  hint: {hint}" if hint else ""


class MonographError(Exception):
    """Base of every error that Monograph raises for a user's mistake or a limit.

    `where` is the place in the user's code: if not given, the line that calls us or a framework that does; `hint` is what
    to do next.
    """

    def __init__(self, message: str, *, where: Origin | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where if where is not None else self._place(sys._getframe(1))
        self.hint = hint
        self.source = ""  # the text of that line, where it is what has failed
        self.cause: BaseException | None = None  # what it came from, once this error is brief

    @staticmethod
    def _place(frame: FrameType) -> Origin:
        return calling_place(frame)

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
        source = f"\n      {self.source}" if self.source else ""
        module = f"\n  in module {self.where.module}" if self.where and self.where.module else ""
        return f"{self.message}{place}{source}{module}{hint_line(self.hint)}"


class DefinitionError(MonographError, AttributeError):
    """A Graph class is written wrongly."""


class ConfigError(DefinitionError):
    """A setting of `config` is wrong."""


class MissingBuildError(DefinitionError, NotImplementedError):
    """A Graph subclass does not override `build`."""


class CaptureError(MonographError):
    """`build()` cannot become a static graph. It is at the innermost line that is not torch's, also in a package."""

    @staticmethod
    def _place(frame: FrameType) -> Origin:
        return step_place(frame)


_LONGEST_SHOWN = 80  # letters of what was given, in a message
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


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def shown(item: object) -> str:
    """What was given, in a message: its repr, or its kind where that has many letters, as of a graph, a module or a tensor."""
    text = repr(item)
    if len(text) <= _LONGEST_SHOWN and "\n" not in text:
        return text
    name = getattr(item, "name", None)
    kind = type(item).__name__
    return f"<{kind} {name}>" if isinstance(name, str) and len(name) <= _LONGEST_SHOWN else f"<{kind}>"


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
    """A plan reads a value that is no longer there, or a step holds more bytes than its budget, whatever is dropped."""


class BackendError(MonographError):
    """A backend cannot lower or run a program."""


class TornStateError(BackendError):
    """A compiled step failed when it had begun to change parameters: part of the state is old, part is new."""


class NonfiniteError(MonographError):
    """A step made a NaN or an infinity; with `config.detect_nonfinite()` the state is that of before it.

    Its `hint` is a report on the op that made it, which ends with what to write instead.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text.removesuffix(hint_line(self.hint))}\n{self.hint}" if self.hint else text


class DistributedError(MonographError):
    """A process of a group is gone, late or runs something else, or more processes or devices are asked for than there are."""


class UnavailableError(MonographError, ImportError):
    """A name of another library that has no counterpart here; the hint says what to use instead."""


class CheckpointError(MonographError):
    """State that cannot be saved or loaded; what was there before is unharmed."""


class ArtifactError(MonographError):
    """A graph cannot be deployed, or what is loaded is no artifact that `save` wrote."""


class DatasetError(MonographError):
    """Files of a data set are missing or damaged."""
