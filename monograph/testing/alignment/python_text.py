"""Python text from which a function, a module or a value can be made again in another process."""

from __future__ import annotations

import ast
import base64
import functools
import inspect
import io
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from monograph.compat.ops import OpOverload
from monograph.compat.tensors import storage_key
from monograph.ir.call.numbers import spell_number
from monograph.ir.call.tree import flatten
from monograph.numerics.judge import same_bits
from monograph.testing.alignment.library_names import (
    Function,
    Unwritable,
    global_names,
    modules_in,
    place,
    reach,
    text_of,
)

_FEW = 200  # elements of a tensor that is written out
_LINE = 100  # characters of encoded bytes in a line
_BUILTIN_OPS = ("aten", "prim", "prims", "quantized", "inductor")


class Source:
    """Collects the lines of a script, and gives an expression for each object that it should hold."""

    def __init__(self) -> None:
        self.imports = ["import torch"]
        self.paths: list[str] = []  # folders from which modules of the user are imported
        self.lines: list[str] = []
        self._names: dict[str, Any] = dict.fromkeys(("align", "Mode"), "what the script is about")

    def expression(self, item: Any, name: str) -> str:
        """An expression that gives `item`; `name` is used if it needs a line of its own."""
        if item is None or type(item) in (bool, int, str, bytes):
            return repr(item)
        if type(item) in (float, complex):
            return spell_number(item)
        if isinstance(item, ModuleType):
            return self._imported(item.__name__)
        if (found := place(item)) is not None:
            return self._imported(*found)
        if inspect.isfunction(item):
            return self._defined(item, name)
        if isinstance(item, MethodType):
            return f"{self.expression(item.__self__, '')}.{item.__func__.__name__}"
        if type(item) is functools.partial:
            return self._partial(item)
        if isinstance(item, (OpOverload, type(torch.ops.aten.sin))):
            if str(item).split(".")[0] not in _BUILTIN_OPS:
                raise Unwritable(f"the operator {item} exists only where it is registered")
            return f"torch.ops.{item}"
        if isinstance(item, type):
            return self._class(item)
        return self._nested(item) or _tensor_text(item) or self._stored(item)

    def assign(self, name: str, item: Any) -> None:
        """A line that gives `item` this name."""
        if name in self._names and not isinstance(item, ModuleType):
            if self._names[name] is not item:
                raise Unwritable(f"two objects have the name {name}")
            return
        elif name in sys.stdlib_module_names and name != getattr(item, "__name__", ""):
            raise Unwritable(f"{name} is the name of a module that the script needs")
        self._names[name] = item
        text = self.expression(item, name)
        if text != name:
            self.lines.append(f"{name} = {text}")

    def _imported(self, module: str, attribute: str = "") -> str:
        inner = ""
        while module not in sys.modules:  # a class such as torch.Tensor stands in the way
            module, _, last = module.rpartition(".")
            inner = f"{last}.{inner}"
        self._import(module)
        self._find(module)
        if reach(module.split(".")[0], module.partition(".")[2]) is not sys.modules[module]:
            self._import("importlib")
            module = f'importlib.import_module("{module}")'
        return f"{module}.{inner}{attribute}".rstrip(".")

    def _import(self, module: str) -> None:
        if (line := f"import {module}") not in self.imports:
            self.imports.append(line)

    def _class(self, item: type) -> str:
        """A class of the user's is imported: its methods need it as it is."""
        if item.__module__ == "__main__" or reach(item.__module__, item.__qualname__) is not item:
            raise Unwritable(f"the class {item.__name__} cannot be imported from a module")
        return self._imported(item.__module__, item.__qualname__)

    def _partial(self, item: functools.partial[Any]) -> str:
        self._import("functools")
        given = [self.expression(part, "") for part in (item.func, *item.args)]
        given += [f"{key}={self.expression(value, '')}" for key, value in item.keywords.items()]
        return f"functools.partial({', '.join(given)})"

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
        plain = inspect.unwrap(function)
        if not inspect.isfunction(plain):
            raise Unwritable(f"{function.__name__} is made around a function that has no text")
        text, node = text_of(function)
        if isinstance(node, ast.Lambda):
            self._assign_named(plain, [], function)
            self._write_defaults(node, plain)
            return f"({ast.unparse(node)})"
        called = node.name
        if self._names.get(called, function) is not function:
            raise Unwritable(f"two objects have the name {called}")
        decorated = plain.__globals__.get(called) is function
        if plain is not function and not decorated:
            raise Unwritable(f"{called} is wrapped in a way that its text does not show")
        node.decorator_list = node.decorator_list if decorated else []
        self._assign_named(plain, node.decorator_list, function)
        if plain.__defaults__ or plain.__kwdefaults__ or not decorated:
            self._write_defaults(node, plain)
            text = ast.unparse(node)
        self.lines.append(text)
        return called

    def _assign_named(self, plain: FunctionType, decorators: list[ast.expr], itself: Any) -> None:
        """Lines for all that a function names: globals, closures, and what its decorators name."""
        scope = plain.__globals__
        named = {key: scope[key] for key in global_names(plain.__code__) if key in scope}
        for part in (part for decorator in decorators for part in ast.walk(decorator)):
            if isinstance(part, ast.Name) and part.id in scope:
                named[part.id] = scope[part.id]
        for key, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            try:
                named[key] = cell.cell_contents
            except ValueError as error:
                raise Unwritable(f"{key} has no value yet") from error
        for key, value in named.items():
            if value is not itself and value is not plain:
                self.assign(key, value)
            elif key != plain.__name__:
                raise Unwritable(f"{plain.__name__} calls itself by another name, {key}")

    def _write_defaults(self, node: Function, plain: FunctionType) -> None:
        """Defaults as they are now: the text may name what only the place of definition knows."""

        def written(value: Any) -> ast.expr:
            return ast.parse(self.expression(value, ""), mode="eval").body

        node.args.defaults = [written(value) for value in plain.__defaults__ or ()]
        given = plain.__kwdefaults__ or {}
        node.args.kw_defaults = [
            written(given[item.arg]) if item.arg in given else None for item in node.args.kwonlyargs
        ]

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
        if isinstance(item, torch.Generator):
            raise Unwritable("a torch.Generator has moved on since")
        try:
            torch.save(item, buffer)
        except Exception as error:  # pickle raises whatever the objects raise
            raise Unwritable(f"a {type(item).__name__} cannot be stored: {error}") from error
        for module in modules_in(buffer):
            if module == "__main__":
                raise Unwritable(f"a {type(item).__name__} holds what lives in the script that ran")
            self._find(module)
        for module in ("base64", "io", "zlib"):
            self._import(module)
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
