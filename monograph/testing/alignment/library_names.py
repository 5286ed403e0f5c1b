"""Where the functions and classes of a script come from: places in libraries, and their own text."""

from __future__ import annotations

import ast
import dis
import importlib
import inspect
import io
import pickletools
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeAlias

# where torch keeps functions that do not know their own place
_PLACES = ("torch", "torch.nn.functional", "torch.Tensor", "torch.linalg", "torch.fft", "torch.special")
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Unwritable(Exception):
    """No text gives this object again; the message says why."""


def place(item: Any) -> tuple[str, str] | None:
    """The module and the name under which an installed library offers an object; None for the user's own."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    parts = module.split(".") if isinstance(module, str) else []
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    candidates = [*((where, getattr(item, "__name__", "")) for where in _PLACES), *((p, name) for p in above)]
    for where, attribute in candidates:
        if not isinstance(where, str) or not isinstance(attribute, str) or not attribute:
            continue
        if "<" in attribute or is_own(where):
            continue
        if reach(where, attribute) is item:
            return where, attribute
    return None


def is_own(module: str) -> bool:
    """True for a module of the user's: its functions are better copied, so that the script stands alone."""
    if module == "__main__":
        return True
    if module.split(".")[0] == "monograph":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and "site-packages" not in file and not file.startswith(sys.base_prefix)


def reach(place: str, attribute: str) -> Any:
    """What a module has under a name with dots; None if it has nothing."""
    module, _, inner = place.rpartition(".")
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), inner, None) if module else None
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    return found


def global_names(code: CodeType) -> Iterator[str]:
    """The globals that a function reads, in functions inside it too."""
    yield from (
        step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from global_names(inner)


def modules_in(stored: io.BytesIO) -> list[str]:
    """The modules of which stored bytes need classes and functions."""
    with zipfile.ZipFile(stored) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        steps = pickletools.genops(archive.read(name))
        return [str(arg).split(" ")[0] for step, arg, _ in steps if step.name == "GLOBAL"]


def text_of(function: Callable[..., Any]) -> tuple[str, Function]:
    """The text of a function, and what it says; of a lambda only its own part of the line."""
    try:
        if inspect.unwrap(function).__name__ != "<lambda>":
            text = textwrap.dedent(inspect.getsource(function)).rstrip()
            node = ast.parse(text).body[0]
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                raise TypeError("its text is no function")
            return text, node
        lines, _ = inspect.findsource(function)
    except (OSError, TypeError, SyntaxError) as error:
        raise Unwritable(f"the text of {function.__name__} is not known: {error}") from error
    places = set(function.__code__.co_positions())  # the whole body is the place of one instruction at least
    for part in ast.walk(ast.parse("".join(lines))):
        if isinstance(part, ast.Lambda):
            body = part.body
            if (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in places:
                return "", part
    raise Unwritable("the text of a lambda was not found: make a function of it")
