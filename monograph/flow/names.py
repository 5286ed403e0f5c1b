"""Where a name of OneFlow's leads: to PyTorch's object of that name, to one of ours, or to an error that says why not.

A namespace that is not written here is PyTorch's module itself, under a second name: `monograph.flow.utils.data` is
`torch.utils.data`. One that holds a refused name is a thin module in front of PyTorch's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from monograph import UnavailableError
from monograph.flow.refusals import REFUSALS, refused

_PREFIX = "monograph.flow."


def forwarding(
    path: str, target: ModuleType | None, elsewhere: Mapping[str, Any] | None = None
) -> Callable[[str], Any]:
    """`__getattr__` of a namespace: what is not written here is in `elsewhere`, or PyTorch's if it has the namespace.

    Raises UnavailableError for a name of OneFlow's that has no counterpart. It is no AttributeError, so that
    `from monograph.flow import name` shows it.
    """
    prefix = f"{path}." if path else ""

    def lookup(name: str) -> Any:
        full = prefix + name
        _check_not_refused(full)
        if elsewhere and name in elsewhere:
            return elsewhere[name]
        value = None if name.startswith("__") else getattr(target, name, None)
        if value is None:
            own = (_PREFIX + path).rstrip(".")
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        if isinstance(value, ModuleType) and value.__name__ == f"torch.{full}":
            with suppress(ModuleNotFoundError):  # a file of ours has no modules below it
                return importlib.import_module(_PREFIX + full)
        return value

    return lookup


def listing(own: Mapping[str, Any], target: ModuleType) -> Callable[[], list[str]]:
    """`__dir__` of a namespace."""
    return lambda: sorted({*own, *dir(target)})


class _Front(ModuleType):
    """A thin module in front of PyTorch's. What is set here is set there: switches are attributes too."""

    def __init__(self, name: str, counterpart: ModuleType, lookup: Callable[[str], Any]) -> None:
        super().__init__(name, counterpart.__doc__)
        self.__dict__.update(_counterpart=counterpart, _lookup=lookup)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_lookup"](name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):  # what an import sets
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_counterpart"], name, value)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_counterpart"])


class _Namespaces(MetaPathFinder, Loader):
    """Finds `monograph.flow.x` that is no file of ours: PyTorch's module x."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, _ = fullname.rpartition(".")
        if not fullname.startswith(_PREFIX):
            return None
        _check_not_refused(fullname.removeprefix(_PREFIX))
        if sys.modules[parent].__name__ == parent and PathFinder.find_spec(fullname, path) is not None:
            return None
        try:
            importlib.import_module(_counterpart(fullname))
        except ModuleNotFoundError:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        counterpart = importlib.import_module(_counterpart(spec.name))
        path = spec.name.removeprefix(_PREFIX)
        if not any(name.startswith(f"{path}.") for name in REFUSALS):
            spec.loader_state = (counterpart.__spec__,)
            return counterpart
        return _Front(spec.name, counterpart, forwarding(path, counterpart))

    def exec_module(self, module: ModuleType) -> None:
        """Give PyTorch's module its spec back, which the import system has replaced."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            (module.__spec__,) = module.__spec__.loader_state


def _check_not_refused(path: str) -> None:
    if (error := refused(path, UnavailableError)) is not None:
        raise error


def _counterpart(name: str) -> str:
    return "torch." + name.removeprefix(_PREFIX)


def share_namespaces() -> None:
    """Let `import monograph.flow.x` find PyTorch's x."""
    if not any(isinstance(finder, _Namespaces) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Namespaces())
