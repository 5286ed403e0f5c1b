"""Objects outside of the graph that build() names: globals and closure variables. Tensors put there are taken out."""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from monograph._torch import is_fake
from monograph.capture.closures import closure_of
from monograph.capture.step import Request
from monograph.errors import is_user_file

_CONTAINERS = (list, dict, set, deque)
# functions and classes are not where a step leaves things; tensors and modules are looked after elsewhere
_WITHOUT_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Tensor, nn.Module)
_NOTHING = object()
_DEPTH = 3  # of functions that call each other


@dataclass(frozen=True)
class _Kept:
    """A container or the attributes of an object, its name in the user's code, and a copy of what it held."""

    name: str
    live: Any
    saved: Any

    def holds_fakes(self) -> bool:
        items = self.live.values() if isinstance(self.live, dict) else self.live
        return any(map(_is_or_holds_fake, items))

    def restore(self) -> None:
        self.live.clear()
        self.live.extend(self.saved) if isinstance(self.live, (list, deque)) else self.live.update(self.saved)


@dataclass(frozen=True)
class _Bound:
    """What a global name stood for; it may have stood for nothing."""

    name: str
    table: dict[str, Any]
    value: Any

    def holds_fakes(self) -> bool:
        return _is_or_holds_fake(self.table.get(self.name))

    def restore(self) -> None:
        if self.value is _NOTHING:
            del self.table[self.name]
        else:
            self.table[self.name] = self.value


class Outside:
    """What the code of build() and of each forward names outside of the graph, as it is before a trace."""

    def __init__(self, request: Request, modules: Mapping[str, nn.Module]) -> None:
        functions = [inspect.unwrap(request.build), *(type(module).forward for module in modules.values())]
        own = {id(module) for module in modules.values()} | {id(request.holdings.owner)}
        self._kept: dict[int | tuple[int, str], _Kept | _Bound] = {}
        for function in functions:
            for table, name in _rebound(function):
                value = table.get(name, _NOTHING)
                self._kept[id(table), name] = _Bound(name, table, value)
            for name, item in _named(function, set(), _DEPTH):
                if id(item) not in own:
                    self._keep(name, item)

    def _keep(self, name: str, item: Any) -> None:
        if isinstance(item, _CONTAINERS):
            self._keep_content(name, item)
        elif not isinstance(item, _WITHOUT_STATE):
            try:
                table = object.__getattribute__(item, "__dict__")
            except AttributeError:
                return
            if isinstance(table, dict):
                self._keep_content(name, table)
                for key, value in list(table.items()):
                    if isinstance(value, _CONTAINERS):
                        self._keep_content(f"{name}.{key}", value)

    def _keep_content(self, name: str, live: Any) -> None:
        saved = dict(live) if isinstance(live, dict) else list(live)
        self._kept.setdefault(id(live), _Kept(name, live, saved))

    def restore(self) -> list[str]:
        """Take tensors of the trace out again; gives the names of what held some."""
        found = [kept for kept in self._kept.values() if kept.holds_fakes()]
        for kept in found:
            kept.restore()
        return [kept.name for kept in found]


def _is_or_holds_fake(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(map(is_fake, item))
    return is_fake(item)


def _named(function: Callable[..., Any], seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """What a function's code names, and what the user's functions among that name."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if id(function) in seen or code is None or not is_user_file(code.co_filename):
        return
    seen.add(id(function))
    names = getattr(function, "__globals__", {})
    items = {name: names[name] for name in _names_in(code) if name in names}
    items |= closure_of(function)
    for name, item in items.items():
        yield name, item
        if inspect.isfunction(item) and depth > 0:
            yield from _named(item, seen, depth - 1)


def _rebound(function: Callable[..., Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The global names that a function of the user's gives new values."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None and is_user_file(code.co_filename):
        for item in dis.get_instructions(code):
            if item.opname == "STORE_GLOBAL":
                yield function.__globals__, item.argval


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
