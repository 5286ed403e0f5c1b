"""Which instructions for vectors compiled code uses: those that the processor says it has, without compiling tests of them."""

from __future__ import annotations

import copy
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from monograph.compat.patching import replaced

_NEEDED: Final = ("valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker", "config")


@contextmanager
def instructions_taken_as_told() -> Iterator[None]:
    """Inside, Inductor takes the first kind of instructions that the processor says it has, which is the one it would find.

    Inductor compiles and loads tests of each kind, also of those that it does not take: 5 s where nothing is kept. A
    compiler that does not know these instructions refuses the step, which is then compiled with Inductor's own tests;
    that libtorch has functions for them, which the tests show too, is looked up.
    What: the list of kinds of `cpu_vec_isa`. Degraded path: where something is missing, where the kinds are known
    already, where the environment asks for one, and on other processors than x86, nothing is replaced.
    """
    module: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
    first = _first_told(module) if sys.platform == "linux" else None
    if first is None:
        yield
        return
    with replaced(module, "valid_vec_isa_list", lambda: [first]):
        yield


def _first_told(module: Any) -> Any:
    if not all(hasattr(module, name) for name in _NEEDED) or os.environ.get("ATEN_CPU_CAPABILITY"):
        return None
    asked = (getattr(module.config.cpp, name, None) for name in ("simdlen", "vec_isa_ok"))
    if any(item is not None for item in asked) or module.valid_vec_isa_list.cache_info().currsize:
        return None
    told = module.x86_isa_checker()
    kinds = module.supported_vec_isa_list if told else []
    first = next((kind for kind in kinds if all(name in told for name in str(kind).split())), None)
    return (
        _untried(first) if first is not None and _in_libtorch(f"Sleef_expf{first.nelements()}_u10") else None
    )


def _untried(kind: Any) -> Any:
    """A kind of instructions that makes no test when Inductor asks whether it is there."""
    untried = copy.copy(kind)
    untried.__class__ = type(type(kind).__name__, (type(kind),), {"__bool__": lambda _: True})
    return untried


def _in_libtorch(name: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")), name)
    except OSError:
        return False
