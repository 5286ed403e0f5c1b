"""Memory for Python's frames, in one piece: a call at the end of a piece gets and frees another each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
# CPython keeps frames in pieces of 16 KiB, or of the next power of two that the frame which needs a new one fits into. This
# one gets 512 KiB, and what it calls has the other half: some hundred frames. Nothing touches its own.
_WORDS = 33_000


def in_one_piece(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The same function, whose frames, and those of what it calls, are in one piece of memory.

    A loop at an unlucky depth of the stack takes twice the time otherwise: its calls ask the system for memory.
    """

    @wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        result: _Result = _with_large_frame(function, args, kwargs)
        return result

    return run


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_with_large_frame: Any = FunctionType(_call.__code__.replace(co_stacksize=_WORDS), globals())
