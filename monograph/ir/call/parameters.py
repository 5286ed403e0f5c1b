"""The parameters of build(): their names, paths of what is in them, and how the arguments of a call fit them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from torch import nn

from monograph.errors import DefinitionError, SignatureError
from monograph.user_code.lines import Origin, user_place

_STEP: Final = r"\.(\w+)|\[\s*(?:\"([^\"]*)\"|'([^']*)'|(\d+))\s*\]"
PATH: Final = re.compile(rf"\w+(?:{_STEP})*")  # as users write it


@lru_cache(maxsize=1024)
def path_parts(path: str) -> tuple[str, ...]:
    """The names and keys in a path, in whichever way they are written."""
    first = re.match(r"\w*", path)
    assert first is not None
    steps = re.finditer(_STEP, path[first.end() :])
    return (first.group(), *(next(filter(None, step.groups()), "") for step in steps))


def is_part_of(path: str, argument: str) -> bool:
    """True for an argument by its path, in whichever way it is written, and for what is in it."""
    if path == argument or (path.startswith(argument) and path[len(argument)] in ".["):
        return True
    if PATH.fullmatch(path) is None or PATH.fullmatch(argument) is None:
        return False
    parts = path_parts(argument)
    return path_parts(path)[: len(parts)] == parts


def argument_names(build: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters of `build`, a star in front of varargs."""
    kinds = inspect.Parameter
    return tuple(
        f"*{p.name}" if p.kind is kinds.VAR_POSITIONAL else p.name
        for p in inspect.signature(build).parameters.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
    )


def argument_name(names: tuple[str, ...], index: int) -> str:
    """What the positional argument at `index` is called, given what `argument_names` says."""
    if index < len(names) and not names[index].startswith("*"):
        return names[index]
    starred = next((name.removeprefix("*") for name in names if name.startswith("*")), None)
    if starred is None:
        return f"args[{index}]"
    return f"{starred}[{index - len(names) + 1}]"


def call_plan(
    build: Callable[..., Any], count: int, names: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How a call with so many positional arguments and these keywords reads in the one form that it is known by.

    The keywords that become positional, in order, and the others. A call that does not fit stays as it is.
    """
    signature = inspect.signature(build)
    try:
        signature.bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return (), names
    moved: list[str] = []
    for parameter in list(signature.parameters.values())[count:]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in names:
            break
        moved.append(parameter.name)
    known = [name for name in signature.parameters if name in names and name not in moved]
    return tuple(moved), (*known, *(name for name in names if name not in {*known, *moved}))


def check_runs_at_once(build: Callable[..., Any], what: str) -> None:
    """Raise DefinitionError for a function that a call only prepares to run: with `yield`, or `async`."""
    function = inspect.unwrap(build)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise DefinitionError(
            f"{what} has a yield, which makes it a generator: a call of it runs nothing",
            where=_definition(function),
            hint="return what the step gives, several values as a tuple",
        )
    if inspect.iscoroutinefunction(function):
        raise DefinitionError(
            f"{what} is async: a call of it runs nothing",
            where=_definition(function),
            hint="write def instead of async def, and await what it needs before the step",
        )


def _definition(function: Callable[..., Any]) -> Origin:
    code = getattr(function, "__code__", None)
    return user_place() if code is None else Origin(file=code.co_filename, line=code.co_firstlineno)


def check_count(build: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise SignatureError if the arguments do not fit the parameters of `build`."""
    try:
        inspect.signature(build).bind(*args, **kwargs)
    except TypeError as error:
        raise SignatureError(
            f"the call does not fit build{inspect.signature(build)}: {error}",
            hint=(_fits(build, *args) and unpacking(args, kwargs)) or _given(args, kwargs),
        ) from None


def _fits(build: Callable[..., Any], *given: Any) -> bool:
    """True if the one argument is a shape, or a batch whose parts fit the parameters."""
    if len(given) != 1 or not isinstance(given[0], (tuple, list)):
        return False
    try:
        inspect.signature(build).bind(*given[0])
    except TypeError:
        return _is_shape(given[0])
    return True


def _is_shape(item: Sequence[Any]) -> bool:
    return all(type(size) is int for size in item)


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """How many arguments there are, or what to do where there are none."""
    if not args and not kwargs:
        return "pass a batch, as to the step itself"
    named = f" and {sorted(kwargs)} keyword" if kwargs else ""
    return f"got {len(args)} positional{named} arguments"


def unpacking(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What to do if a whole batch came as one argument; nothing if that is not so."""
    if len(args) != 1 or kwargs or not isinstance(args[0], (tuple, list)) or len(args[0]) < 2:
        return ""
    if _is_shape(args[0]):
        return f"for a tensor of this shape write mg.spec({tuple(args[0])}), for labels mg.spec(shape, torch.int64)"
    return f"the batch came as one {type(args[0]).__name__} of {len(args[0])}: unpack it, step(*batch)"


def check_is_no_module(cls: type) -> None:
    """Raises DefinitionError for a class of graphs that are modules too."""
    if issubclass(cls, nn.Module):
        raise DefinitionError(
            f"{cls.__name__} is a Graph and an nn.Module: a Graph holds modules, and is none",
            hint="write the model as an nn.Module, and a Graph with self.model = model",
        )
