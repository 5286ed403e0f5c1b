"""The calls by which a save changes the disk, counted, so that a test can stop it at each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close", "listdir")


@contextmanager
def watched(
    before: Callable[[int, str, tuple[Any, ...]], None], after: Callable[[int, str], None]
) -> Iterator[None]:
    """Call `before(number, name, arguments)` and `after(number, name)` around each of the calls, from 1 on."""
    plain = {name: getattr(os, name) for name in NAMES}
    count = 0

    def wrapper(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            number = count
            before(number, name, args)
            try:
                return plain[name](*args, **options)
            finally:
                after(number, name)

        return call

    for name in NAMES:
        setattr(os, name, wrapper(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(os, name, function)


def count_calls(function: Callable[[], object]) -> int:
    """How many of the calls a function makes."""
    numbers = [0]
    with watched(lambda number, _name, _args: numbers.append(number), lambda _number, _name: None):
        function()
    return numbers[-1]
