"""That tensors are fakes, hidden from libraries that ask for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monograph.user_code.files import is_inside

_NAME = "FakeTensor"
_LOCK = threading.Lock()
_RUNNING: set[int] = set()  # the modes whose traces run, by their ids


class _OfOthers(type):
    """The class of fakes as others see it: those of a trace that runs here are plain tensors."""

    def __instancecheck__(cls, item: Any) -> bool:
        theirs = torch._subclasses.fake_tensor.FakeTensor
        return isinstance(item, theirs) and id(item.fake_mode) not in _RUNNING

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, torch._subclasses.fake_tensor.FakeTensor)


class _Fakes(metaclass=_OfOthers):
    """Stands for FakeTensor."""


@contextmanager
def fakes_hidden(mode: Any) -> Iterator[None]:
    """Inside, code that is not torch's finds no fakes of this mode by `isinstance(tensor, torch._subclasses.FakeTensor)`.

    What: the name in that package. Why: transformers does other things with tensors for which that holds. It keeps an
    attention mask that hides nothing, for one, and the kernels that take none round differently. Degraded path: so it
    does.
    """
    try:
        with _LOCK:
            _RUNNING.add(id(mode))
            _show_by_asker()
        yield
    finally:
        with _LOCK:
            _RUNNING.discard(id(mode))
            _show_by_asker()


def _show_by_asker() -> None:
    """Let the package answer by who asks, while a trace runs: a module asks `__getattr__` for names that it has not."""
    package: Any = torch._subclasses
    theirs: Any = torch._subclasses.fake_tensor.FakeTensor
    if not _RUNNING:
        setattr(package, _NAME, theirs)
        package.__dict__.pop("__getattr__", None)
    elif _NAME in package.__dict__:

        def found(name: str) -> Any:
            if name != _NAME:
                raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
            return theirs if is_inside(sys._getframe(1).f_code.co_filename) else _Fakes

        package.__getattr__ = found
        delattr(package, _NAME)
