"""What a step can ask of modes that torch and Python keep to themselves: `torch.get_num_threads()`, `gc.isenabled()`.

No object shows what such a function answers by. So it is asked before the trace, which changes some answers itself, and
asked again before each call of a build whose code knows the function.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import decimal
import functools
import gc
import locale
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch

from monograph.capture.guards.sources.places import Source

_DISPATCHER = functools.singledispatch(lambda _item: None).__code__  # type: ignore[attr-defined]
_OF_TORCH = (
    "get_num_threads", "get_num_interop_threads", "initial_seed", "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
    "is_warn_always_enabled", "get_deterministic_debug_mode", "get_default_device", "is_autocast_enabled",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What code may ask by the function or class `known`, and its answer; answers are compared by value."""

    known: Any
    label: str
    ask: Callable[[], Any]
    is_set_by_steps: bool = False  # and put back: what counts is the answer from before
    is_no_in_captures: bool = False  # whatever it was before


# A capture runs outside of inference mode: its tensors are recorded.
_INFERENCE = Question(
    torch.is_inference_mode_enabled,
    "torch.is_inference_mode_enabled()",
    torch.is_inference_mode_enabled,
    is_set_by_steps=True,
    is_no_in_captures=True,
)


def _questions() -> tuple[Question, ...]:
    torchs = [(name, getattr(torch, name)) for name in _OF_TORCH if hasattr(torch, name)]
    context = "the context of decimal"
    return (
        *(Question(function, f"torch.{name}()", function) for name, function in torchs),
        *(
            Question(known, "the types of autocast", _autocast_types, is_set_by_steps=True)
            for known in (
                torch.get_autocast_dtype,
                torch.autocast,
                torch.cuda.amp.autocast,
            )
        ),
        _INFERENCE,
        Question(torch.random.initial_seed, "torch.random.initial_seed()", torch.random.initial_seed),
        Question(decimal.getcontext, context, _decimal_context),
        Question(decimal.Decimal, context, _decimal_context),
        Question(gc.isenabled, "gc.isenabled()", gc.isenabled),
        Question(locale.getlocale, "locale.getlocale()", locale.getlocale),
        Question(np.geterr, "numpy.geterr()", lambda: tuple(np.geterr().items())),
        Question(sys.getrecursionlimit, "sys.getrecursionlimit()", sys.getrecursionlimit),
        Question(sys.getswitchinterval, "sys.getswitchinterval()", sys.getswitchinterval),
        Question(threading.active_count, "threading.active_count()", threading.active_count),
    )


def _autocast_types() -> tuple[torch.dtype, ...]:
    return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")


def _decimal_context() -> str:
    return repr(decimal.getcontext())


class _Registered:
    """What is registered for the abstract classes that steps know, directly or for what counts as a subclass.

    Python counts registrations for all classes together, and imports make many: only when that number has moved are the
    classes looked at. What an import registers of its own classes says nothing of the objects that were there before.
    """

    def __init__(self) -> None:
        self._token: object = None
        self._changes = 0
        self._known: weakref.WeakKeyDictionary[type, frozenset[Any]] = weakref.WeakKeyDictionary()
        self._modules: frozenset[str] = frozenset()  # that were there when it was looked at last

    def watch(self, cls: type) -> None:
        """Changes of this class count from now on."""
        if cls not in self._known:
            self.changes()
            self._known[cls] = _registered_for(cls)
            self._modules = frozenset(sys.modules)

    def changes(self) -> int:
        """How often the registrations of a class that is watched have changed."""
        token = abc.get_cache_token()
        if token != self._token:
            now = {cls: _registered_for(cls) for cls in list(self._known)}
            self._changes += any(self._has_changed(self._known[cls], found) for cls, found in now.items())
            self._known.update(now)
            self._token, self._modules = token, frozenset(sys.modules)
        return self._changes

    def _has_changed(self, before: frozenset[Any], now: frozenset[Any]) -> bool:
        return not before <= now or any(map(self._was_there, now - before))

    def _was_there(self, reference: Callable[[], type | None]) -> bool:
        """True unless the class is gone or was made by an import since."""
        cls = reference()
        return cls is not None and cls.__module__ in self._modules


def _registered_for(cls: type) -> frozenset[Any]:
    pending: list[Any] = [cls]
    done, found = set[int](), set[Any]()
    while pending:
        item: Any = pending.pop()
        if id(item) not in done and issubclass(type(item), abc.ABCMeta):
            done.add(id(item))
            own = _abc._get_dump(item)[0]
            found |= own
            pending += [*type.__subclasses__(item), *filter(None, (reference() for reference in own))]
    return frozenset(found)


# one for all classes, since what is registered for one counts for its bases too
_REGISTERED = _Registered()  # a cache
_SUBCLASSES = Question(abc.ABCMeta, "what is registered for abstract classes", _REGISTERED.changes)
_QUESTIONS: Mapping[int, Question] = {id(item.known): item for item in _questions()}


def answers() -> dict[str, Any]:
    """What is answered now, by the labels of the questions."""
    return {item.label: item.ask() for item in _QUESTIONS.values()}


@dataclass(eq=False)
class Answer(Source):
    """What a question is answered."""

    ask: Callable[[], Any]

    def now(self) -> Mapping[Any, Any]:
        return {"": self.ask()}


def question_about(item: Any) -> Question | None:
    """What code can ask that knows a function or a class; None for most."""
    if (found := _QUESTIONS.get(id(item))) is not None:
        return found
    if type(item) is FunctionType and item.__code__ is _DISPATCHER:
        registry: Mapping[type, Any] = item.registry  # type: ignore[attr-defined]
        return Question(item, f"what is registered for {item.__name__}()", lambda: tuple(registry.items()))
    if abc.ABCMeta in type(item).__mro__:
        _REGISTERED.watch(item)
        return _SUBCLASSES
    return None
