"""Python text from which a function, a module or a value can be made again in another process."""

from __future__ import annotations

import ast
import base64
import importlib
import inspect
import io
import math
import sys
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monograph._torch import storage_key
from monograph.ir.tree import flatten
from monograph.runtime.judge import same_bits

# where torch keeps functions that do not know their own place
_PLACES = ("torch", "torch.nn.functional", "torch.Tensor", "torch.linalg", "torch.fft", "torch.special")
_FEW = 200  # elements of a tensor that is written out
_LINE = 100  # characters of encoded bytes in a line


class Unwritable(Exception):
    """No text gives this object again; the message says why."""


class Source:
    """Collects the lines of a script, and gives an expression for each object that it should hold."""

    def __init__(self) -> None:
        self.imports = ["import torch"]
        self.paths: list[str] = []  # folders from which modules of the user are imported
        self.lines: list[str] = []
        self._names: dict[str, Any] = {"torch": torch}

    def expression(self, item: Any, name: str) -> str:
        """An expression that gives `item`; `name` is used if it needs a line of its own."""
        if item is None or type(item) in (bool, int, str, bytes):
            return repr(item)
        if type(item) is float:
            return repr(item) if math.isfinite(item) else f'float("{item}")'
        if isinstance(item, ModuleType):
            return self._imported(item.__name__)
        if (place := _place(item)) is not None:
            return self._imported(*place)
        if inspect.isfunction(item):
            return self._defined(item, name)
        return self._nested(item) or _tensor_text(item) or self._stored(item)

    def assign(self, name: str, item: Any) -> None:
        """A line that gives `item` this name."""
        if name in self._names:
            if self._names[name] is not item:
                raise Unwritable(f"two objects have the name {name}")
            return
        self._names[name] = item
        text = self.expression(item, name)
        if text != name:
            self.lines.append(f"{name} = {text}")

    def _imported(self, module: str, attribute: str = "") -> str:
        line = f"import {module}"
        if line not in self.imports:
            self.imports.append(line)
        self._find(module)
        return f"{module}.{attribute}" if attribute else module

    def _find(self, module: str) -> None:
        """Remember the folder of a module that is not installed."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or "site-packages" in file or file.startswith(sys.base_prefix):
            return
        folder = Path(file).resolve().parents[module.count(".") + (Path(file).name == "__init__.py")]
        if str(folder) not in self.paths:
            self.paths.append(str(folder))

    def _defined(self, function: Callable[..., Any], name: str) -> str:
        """The text of a function of the user's, after that of all that it names."""
        text = _text_of(function)
        found = inspect.getclosurevars(function)
        for key, value in {**found.globals, **found.nonlocals}.items():
            if value is not function:
                self.assign(key, value)
        if text.startswith("lambda"):
            return text
        self.lines.append(text)
        return function.__name__ if function.__name__ != name else name

    def _nested(self, item: Any) -> str:
        """Plain containers, item by item; nothing if tensors in them share memory."""
        if type(item) not in (tuple, list, dict) or _shares_memory(item):
            return ""
        if type(item) is dict:
            pairs = [(self.expression(key, ""), self.expression(value, "")) for key, value in item.items()]
            return "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        inner = ", ".join(self.expression(entry, "") for entry in item)
        if type(item) is list:
            return f"[{inner}]"
        return f"({inner},)" if item else "()"

    def _stored(self, item: Any) -> str:
        """The bytes of an object, with its classes by name."""
        for part in item.modules() if isinstance(item, torch.nn.Module) else (item,):
            if type(part).__module__ == "__main__":
                raise Unwritable(
                    f"the class {type(part).__name__} lives in the script that ran, not in a module"
                )
            self._find(type(part).__module__)
        buffer = io.BytesIO()
        try:
            torch.save(item, buffer)
        except Exception as error:  # pickle raises whatever the objects raise
            raise Unwritable(f"a {type(item).__name__} cannot be stored: {error}") from error
        for line in ("import base64", "import io", "import zlib"):
            if line not in self.imports:
                self.imports.append(line)
        encoded = base64.b64encode(zlib.compress(buffer.getvalue())).decode()
        parts = [f'    "{encoded[start : start + _LINE]}"' for start in range(0, len(encoded), _LINE)]
        opened = "torch.load(io.BytesIO(zlib.decompress(base64.b64decode("
        return "\n".join([opened, *parts, "))), weights_only=False)"])


def _shares_memory(item: Any) -> bool:
    leaves: list[Any] = []
    flatten(item, leaves)
    keys = [storage_key(leaf) for leaf in leaves if _is_plain(leaf)]
    return len(set(keys)) < len(keys)


def _is_plain(item: Any) -> bool:
    return type(item) is torch.Tensor and item.layout is torch.strided


def _tensor_text(item: Any) -> str:
    """A small tensor with its values in plain sight; nothing if that would not be the same tensor."""
    if not _is_plain(item) or not 0 < item.numel() <= _FEW or not item.is_contiguous():
        return ""
    if item.device.type != "cpu" or item.untyped_storage().nbytes() != item.nbytes or not item.is_leaf:
        return ""
    values = item.tolist()
    text = f"torch.tensor({values}, dtype={item.dtype}"
    readable = "nan" not in text and "inf" not in text
    if not readable or not same_bits(torch.tensor(values, dtype=item.dtype), item):
        return ""
    return f"{text}, requires_grad=True)" if item.requires_grad else f"{text})"


def _place(item: Any) -> tuple[str, str] | None:
    """The module and the name under which an installed library offers an object; None for the user's own."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    candidates = [*((place, getattr(item, "__name__", "")) for place in _PLACES), (module, name)]
    for place, attribute in candidates:
        if not isinstance(place, str) or not isinstance(attribute, str) or not attribute:
            continue
        if place == "__main__" or "<" in attribute or _is_own(place):
            continue
        if _reach(place, attribute) is item:
            return place, attribute
    return None


def _is_own(module: str) -> bool:
    """True for a module of the user's: its functions are better copied, so that the script stands alone."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and "site-packages" not in file and not file.startswith(sys.base_prefix)


def _reach(place: str, attribute: str) -> Any:
    module, _, inner = place.rpartition(".")
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), inner, None) if module else None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found


def _text_of(function: Callable[..., Any]) -> str:
    """The text of a function; of a lambda only its own part of the line."""
    try:
        if function.__name__ != "<lambda>":
            return textwrap.dedent(inspect.getsource(function)).rstrip()
        lines, _ = inspect.findsource(function)
    except (OSError, TypeError) as error:
        raise Unwritable(f"the text of {function.__name__} is not known: {error}") from error
    places = set(function.__code__.co_positions())  # the whole body is the place of one instruction at least
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Lambda):
            body = node.body
            if (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in places:
                return ast.unparse(node)
    raise Unwritable("the text of a lambda was not found: make a function of it")
