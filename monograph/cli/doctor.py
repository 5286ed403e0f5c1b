"""What Monograph finds on this machine: versions, processor, compiler, and what it keeps on disk."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from monograph.compat import NEWEST_TORCH, OLDEST_TORCH
from monograph.compat.inductor.directories import ADVICE, cache_directories
from monograph.compat.inductor.disk_cache import cache_directory, clear_cache, entries, processor_name
from monograph.compat.inductor.loading import compiler_missing

__all__ = ["Finding", "clear_cache", "findings"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `problem` says what to do about it, empty if all is well."""

    what: str
    value: str
    problem: str = ""


def findings() -> Iterator[Finding]:
    """Everything that decides how steps run here."""
    yield Finding("monograph", _version("monograph"))
    yield Finding("torch", torch.__version__, _torch_problem())
    yield Finding("Python", platform.python_version())
    yield Finding(
        "processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    yield Finding("vector instructions", torch.backends.cpu.get_cpu_capability())
    yield Finding("oneDNN", "yes" if torch.backends.mkldnn.is_available() else "no")
    yield Finding("accelerator", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    missing = compiler_missing()
    yield Finding("C++ compiler", "no" if missing else "yes", f"{missing}: install g++" if missing else "")
    found = entries()
    size = sum(bytes_ for _, bytes_ in found)
    steps = sum(path.parent.name == "steps" for path, _ in found)
    yield Finding(
        "cache",
        f"{cache_directory() or 'none'}: {steps} compiled steps, {size / 2**20:.1f} MiB",
        _cache_problem(),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _torch_problem() -> str:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if OLDEST_TORCH <= (major, minor) <= NEWEST_TORCH:
        return ""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
    return f"meant for torch {oldest} to {newest}"


def _cache_problem() -> str:
    problem = cache_directories().problem
    return f"{problem}: {ADVICE}" if problem else ""
