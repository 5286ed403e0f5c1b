"""Attributes of torch replaced for a while, and put back whatever happens. No API of torch's, and nothing can miss here."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


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


# What: the functions in C++ by which `torch.nn.functional.interpolate` makes a tensor of another size.
_RESIZING = (
    *(f"{name}{dims}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for dims in "123"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


@contextmanager
def resizing_by_ops(size_of: Callable[[Any, float], Any]) -> Iterator[None]:
    """Inside, in this thread, `interpolate` calls the ops that these functions call, with `size_of(size, factor)` for each size.

    What: the functions of `torch._C._nn`. Why: they take plain sizes alone, and the ops take sizes that vary. Degraded path:
    a size that is given there is a number of the build.
    """

    def by_op(name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.aten, name).default

        def run(tensor: torch.Tensor, sizes: Any, *options: Any) -> Any:
            *flags, factors = options
            if sizes is None:
                sizes = [size_of(*pair) for pair in zip(tensor.shape[2:], factors, strict=True)]
            return op(tensor, sizes, *flags, *(factors or [None] * len(sizes)))

        return run

    functions = torch._C._nn
    with ExitStack() as stack:
        for name in _RESIZING:
            if hasattr(functions, name):
                replace_here(stack, functions, name, by_op(name))
        yield
