"""Attributes of torch replaced for a while, and put back whatever happens. No API of torch's, and nothing can miss here."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Inside, a logger of torch is off. What: the names of its loggers. Degraded path: what it logs is seen."""
    found = logging.getLogger(logger)
    before, found.disabled = found.disabled, True
    try:
        yield
    finally:
        found.disabled = before


_ABSENT = object()


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give an attribute of an object or module a value until the stack ends."""
    before = owner.__dict__.get(name, _ABSENT)
    setattr(owner, name, value)

    def put_back() -> None:
        if before is not _ABSENT:
            setattr(owner, name, before)
        elif name in owner.__dict__:
            delattr(owner, name)

    stack.callback(put_back)
    stack.callback(
        put_back
    )  # twice: an interrupt may cut the first one short; to hold signals back costs more


def replace_here(stack: ExitStack, owner: Any, name: str, function: Any) -> None:
    """Replace a function for this thread alone: others go on with the one that is there."""
    elsewhere = getattr(owner, name, None) or getattr(builtins, name, None)
    replace(stack, owner, name, function if elsewhere is None else in_this_thread(function, elsewhere))


def in_this_thread(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `here` in the thread that makes it, and `elsewhere` in all others."""
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (here if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return chosen


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object or module, replaced for a while."""
    with ExitStack() as stack:
        replace(stack, owner, name, value)
        yield
