"""The function that makes a graph and its batches, named so that another process finds it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from types import ModuleType
from typing import Any, TypeVar, cast

from monograph.errors import DefinitionError
from monograph.ir.text import count_text

Factory = Callable[[], tuple[Any, Any]]
T = TypeVar("T")

_HINT = (
    'write "package.module:function" or "file.py:function", or pass a function of a module; it returns the graph and its batches: '
    "def make(): return graph, batches"
)


class FactoryError(DefinitionError):
    """A name or a function by which no process finds the factory."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint=_HINT)


def factory_name(factory: str | Factory) -> str:
    """Where to find the factory: "package.module:function" or "/path/of/file.py:function"."""
    if isinstance(factory, str):
        place, _, name = factory.rpartition(":")
        if not place or not name:
            raise FactoryError(f"{factory!r} names no factory")
        return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else factory
    name, module = getattr(factory, "__qualname__", ""), sys.modules.get(getattr(factory, "__module__", ""))
    if module is None or not name or _member(module, name) is not factory:
        raise FactoryError(
            f"{name or factory!r} cannot be found by another process: it is no function of a module"
        )
    return f"{_place(module)}:{name}"


def _member(module: ModuleType, name: str) -> Any:
    return reduce(lambda item, part: getattr(item, part, None), name.split("."), cast(Any, module))


def _place(module: ModuleType) -> str:
    if module.__name__ != "__main__":
        return str(module.__name__)
    if module.__spec__ is not None:  # python -m package.module
        return str(module.__spec__.name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise FactoryError("a function typed at a prompt cannot be found by another process")
    return str(os.path.abspath(file))


def load_factory(name: str) -> Factory:
    """The function of this name, in the process that runs it."""
    place, _, function = name.rpartition(":")
    is_file = place.endswith(".py")
    found = None
    if not is_file or _may_have(place, function):
        found = _member(_file(place) if is_file else _module(place), function)
    if not callable(found):
        raise FactoryError(f"there is no function {function} in {place}")
    return found  # type: ignore[no-any-return]


def made_by(name: str, kind: type[T]) -> tuple[T, Iterable[Any]]:
    """What the factory of this name makes. Raises DefinitionError unless that is a graph, of this class, with its batches."""
    made = load_factory(name)()
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], kind):
        how_many = f": it has {count_text(len(made), 'item')}" if isinstance(made, (tuple, list)) else ""
        raise DefinitionError(
            f"{name} returns a {type(made).__name__} and not a graph with its batches{how_many}",
            hint="it has to return a Graph and its batches: return graph, batches",
        )
    graph, batches = made
    if not isinstance(batches, Iterable):
        raise DefinitionError(
            f"{name} returns a {type(batches).__name__} for batches: they have to be a list, a loader or the like",
            hint="return graph, batches",
        )
    return graph, batches


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own imports
        raise FactoryError(f"there is no module {name}") from error


def _may_have(path: str, function: str) -> bool:
    """False for a file that does not spell the name of a function: it need not run, which may be a whole training."""
    if not os.path.isfile(path):
        raise FactoryError(f"there is no file {path}")
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    return function.partition(".")[0] in text or "import *" in text


def _file(path: str) -> ModuleType:
    """Run a file as a module, with its folder first in the search path, as `python file.py` has it."""
    sys.path.insert(0, os.path.dirname(path))
    name = f"factory_in_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
