"""Waits of a compilation: for other processes, of which one that was stopped keeps the locks of Inductor, and for g++."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from monograph.compat.patching import replace_here, replaced

_HEADER_SECONDS = 10.0  # without a compiled header a step takes about as much longer


@contextmanager
def short_waits() -> Iterator[None]:
    """Inside, this thread, which compiles to a folder of its own, waits for no other that compiles the same step.

    For a header that another process compiles it waits ten seconds, and then goes without.
    What: functions of `codecache`, the directory of locks and those that compile headers. What tries out the processor
    writes to a common folder, so that is done before. Degraded path: it waits, ten minutes at most.
    """
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder, ExitStack() as stack:
        if hasattr(codecache, "get_lock_dir"):
            replace_here(stack, codecache, "get_lock_dir", lambda: folder)
        if hasattr(codecache, "_worker_compile_cpp") and hasattr(codecache, "_precompile_header"):
            _compile_headers_soon(stack, codecache)
        yield


@contextmanager
def files_reported(report: Callable[[str], object]) -> Iterator[None]:
    """Inside, `report` gets each file that goes to the C++ compiler, where most of the time is spent.

    What: the method of Inductor's `CppBuilder`. Degraded path: nothing is reported but the time.
    """
    builder: Any = getattr(importlib.import_module("torch._inductor.cpp_builder"), "CppBuilder", None)
    build = getattr(builder, "build", None)
    if build is None:
        yield
        return
    numbers = count(1)

    def reported(self: Any) -> Any:
        report(f"g++ is at file {next(numbers)}")
        return build(self)

    with replaced(builder, "build", reported):
        yield


def _compile_headers_soon(stack: ExitStack, codecache: Any) -> None:
    compile_locked, precompile = codecache._worker_compile_cpp, codecache._precompile_header
    locks = importlib.import_module("filelock")

    def compile_soon(lock: str, builders: Any) -> None:
        with locks.FileLock(lock, timeout=_HEADER_SECONDS):
            pass  # it is free now
        compile_locked(lock, builders)

    def header_or_none(*args: Any, **options: Any) -> str | None:
        try:
            header: str = precompile(*args, **options)
        except locks.Timeout:
            return None
        return header

    replace_here(stack, codecache, "_worker_compile_cpp", compile_soon)
    replace_here(stack, codecache, "_precompile_header", header_or_none)
