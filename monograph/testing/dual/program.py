"""The calls of a case as a program that one can read, and run with plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from monograph.ir.call.numbers import spell_number

_MANY_ELEMENTS = 24  # of a tensor, in a message

_INFIX: Final[Mapping[str, str]] = MappingProxyType(
    {
        "__add__": "+",
        "__sub__": "-",
        "__mul__": "*",
        "__truediv__": "/",
        "__floordiv__": "//",
        "__mod__": "%",
        "__pow__": "**",
        "__matmul__": "@",
        "__and__": "&",
        "__or__": "|",
        "__xor__": "^",
        "__lshift__": "<<",
        "__rshift__": ">>",
        "__lt__": "<",
        "__le__": "<=",
        "__gt__": ">",
        "__ge__": ">=",
        "__eq__": "==",
        "__ne__": "!=",
    }
)
_PREFIX: Final[Mapping[str, str]] = MappingProxyType({"__neg__": "-", "__invert__": "~"})


class Program:
    """Names for tensors and modules, and a line for each call."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, Any]] = {}  # the object is kept, so that its id stays its own
        self._inputs: list[tuple[str, torch.Tensor]] = []
        self._lines: list[str] = []

    @property
    def num_lines(self) -> int:
        """How many lines it has so far."""
        return len(self._lines)

    def mark(self, line: int) -> None:
        """Say that this line is the one that went wrong."""
        self._lines[line] += "  # <- this call differs"

    def add_input(self, tensor: torch.Tensor, made_by: str) -> None:
        """A tensor that a generator drew, and the code that makes it."""
        name = self._name(tensor)
        self._inputs.append((name, tensor.detach().clone()))
        self._lines.append(f"{name} = {made_by}")

    def add_call(self, text: str, result: Any) -> None:
        """A call and what it gave."""
        target = self._targets(result)
        self._lines.append(f"{target} = {text}" if target else text)

    def add_found(self, text: str, item: Any) -> None:
        """Where something comes from that has no name yet."""
        if id(item) not in self._names:
            self.add_call(text, item)

    def expression(self, item: Any) -> str:
        """How an argument is written: names for tensors and modules, else Python."""
        if id(item) in self._names:
            return self._names[id(item)][0]
        if type(item) in (tuple, list):
            inner = ", ".join(map(self.expression, item))
            if type(item) is list:
                return f"[{inner}]"
            return f"({inner},)" if len(item) == 1 else f"({inner})"
        if type(item) is dict:
            return "{" + ", ".join(f"{key!r}: {self.expression(value)}" for key, value in item.items()) + "}"
        if isinstance(item, slice):
            bounds = map(self.expression, (item.start, item.stop, item.step))
            return f"slice({', '.join(bounds)})"
        if isinstance(item, (float, complex)):
            return spell_number(item)
        if isinstance(item, torch.Tensor):
            return f"torch.tensor({item.tolist()!r}, dtype={item.dtype})"
        if isinstance(item, torch.device):
            return f"torch.{item!r}"
        return "..." if item is Ellipsis else repr(item)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The text of a call; `name` is a dotted path, or that of a method if it begins with a dot."""
        operands = [self.expression(arg) for arg in args]
        if name.startswith("."):
            return self._method(name[1:], operands, kwargs)
        return f"{name}({self._listed(operands, kwargs)})"

    def text(self, seed: int) -> str:
        """The program, and the inputs with their values if they are few."""
        lines = ["  import torch", "  from monograph.testing.strategies import TensorSpec, build"]
        lines += [f"  {line}" for line in (f"torch.manual_seed({seed})", *self._lines)]
        inputs = [f"  {name}: {_told(tensor)}" for name, tensor in self._inputs]
        return "\n".join(["the calls of this case:", *lines, "its inputs:", *(inputs or ["  none"])])

    def _method(self, name: str, operands: list[str], kwargs: dict[str, Any]) -> str:
        owner, rest = operands[0], operands[1:]
        if name in _INFIX and rest:
            return f"{owner} {_INFIX[name]} {rest[0]}"
        if name in _PREFIX:
            return f"{_PREFIX[name]}{owner}"
        if name == "__getitem__":
            return f"{owner}[{rest[0]}]"
        if name == "__setitem__":
            return f"{owner}[{rest[0]}] = {rest[1]}"
        if name == "__call__":
            return f"{owner}({self._listed(rest, kwargs)})"
        return f"{owner}.{name}({self._listed(rest, kwargs)})"

    def attribute(self, owner: Any, name: str) -> str:
        """The text of a look at an attribute."""
        return f"{self.expression(owner)}.{name}"

    def _listed(self, operands: list[str], kwargs: dict[str, Any]) -> str:
        return ", ".join([*operands, *(f"{name}={self.expression(value)}" for name, value in kwargs.items())])

    def _targets(self, result: Any) -> str:
        """The names that a result is bound to; nothing for results that have none."""
        if isinstance(result, (torch.Tensor, nn.Module)):
            return self._name(result)
        if isinstance(result, (tuple, list)) and result:
            names = [self._targets(item) or "_" for item in result]
            if any(name != "_" for name in names):
                return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
        return ""

    def _name(self, item: Any) -> str:
        if id(item) not in self._names:
            kind = "x" if isinstance(item, torch.Tensor) else "m"
            self._names[id(item)] = (f"{kind}{len(self._names)}", item)
        return self._names[id(item)][0]


def _told(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    return f"{text} {tensor.tolist()}" if tensor.numel() <= _MANY_ELEMENTS else text
