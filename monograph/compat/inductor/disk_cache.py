"""Compiled libraries on disk: a second process with the same program starts without a compiler."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from monograph import native
from monograph.compat.inductor import arithmetic as _arithmetic
from monograph.compat.inductor import codegen as _codegen
from monograph.compat.inductor import decompositions as _decompositions
from monograph.compat.inductor import eager_formulas as _eager_formulas
from monograph.compat.inductor import less_work as _less_work
from monograph.compat.inductor import loading as _inductor
from monograph.compat.inductor import lowerings as _lowerings
from monograph.compat.inductor import write_order as _writes_last
from monograph.compat.inductor.building import interface as _interface
from monograph.compat.inductor.building import processor as _processor
from monograph.compat.inductor.checks import error_codes as _error_codes
from monograph.compat.inductor.checks import indices as _index_checks
from monograph.compat.inductor.checks import parallel as _parallel_checks
from monograph.compat.inductor.directories import ADVICE, cache_directories, is_private
from monograph.compat.inductor.loading import OPTIONS
from monograph.compat.inductor.written import memory_lines as _memory_lines
from monograph.compat.inductor.written import size_quotients as _size_quotients
from monograph.compat.inductor.written.memory_lines import Stretch
from monograph.compat.traces import size_symbols as _size_symbols
from monograph.errors import BackendError

_OWN = (
    _arithmetic,
    _codegen,
    _decompositions,
    _eager_formulas,
    _error_codes,
    _index_checks,
    _inductor,
    _interface,
    _less_work,
    _lowerings,
    _memory_lines,
    _parallel_checks,
    _processor,
    _size_quotients,
    _size_symbols,
    _writes_last,
    native,
)  # what makes compiled code
_SUMS = "sums.json"
PARTS = ("steps", "kernels", "shared")  # compiled steps, chosen kernels, and what all steps are linked with


def cache_directory() -> Path | None:
    """Where new compiled steps and kernel choices are kept; None if nothing can be."""
    return cache_directories().write


def placed(part: str, name: str, there: Callable[[Path], bool]) -> Path | None:
    """Where something of a part is, or else where it would be kept; None if there is no such place."""
    places = cache_directories()
    found = next((path for place in places.read if there(path := place / part / name)), None)
    return found if found is not None or places.write is None else places.write / part / name


@dataclass(frozen=True)
class Entry:
    """One compiled step, or part of steps: a directory with the library and the SHA-256 of each file, written at once."""

    directory: Path
    name: str = "step.so"

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.directory / self.name

    @property
    def calls_python_ops(self) -> bool:
        """True if the library calls ops that have no C interface."""
        return self.library.with_suffix(".json").exists()

    @property
    def assumed(self) -> list[str]:
        """What the library takes for granted of sizes that vary, as Python over their names."""
        found: list[str] = json.loads(self.library.with_suffix(_inductor.ASSUMED).read_text())
        return found

    @property
    def stretches(self) -> list[Stretch]:
        """The memory that the library takes and gives back, in order, at the sizes that it was compiled for first; empty if that is not known."""
        path = self.library.with_suffix(_inductor.MEMORY)
        return list(map(Stretch.from_json, json.loads(path.read_text()))) if path.exists() else []

    def is_whole(self) -> bool:
        """True if it is there and its files are what was written. Raises nothing: a broken entry is as none."""
        try:
            sums = json.loads((self.directory / _SUMS).read_text())
            if not all(map(is_private, (self.directory, *(self.directory / name for name in sums)))):
                return False
            return bool(sums) and all(_sum(self.directory / name) == known for name, known in sums.items())
        except (OSError, ValueError, AttributeError):
            return False

    @contextmanager
    def written(self) -> Iterator[Path]:
        """Where to write the library; the entry appears whole when the block ends, also beside other writers."""
        parent = self.directory.parent
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))
        try:
            yield beside / self.name
            files = sorted(beside.iterdir())
            for path in files:
                path.chmod(
                    path.stat().st_mode & ~0o022
                )  # others may not change them, whatever the umask says
            sums = {path.name: _sum(path) for path in files}
            (beside / _SUMS).write_text(json.dumps(sums))
            (beside / _SUMS).chmod(0o600)
            self._put(beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _put(self, beside: Path) -> None:
        try:
            os.rename(beside, self.directory)
        except OSError:  # another writer was first, or what stands there is broken
            if not self.is_whole():
                aside = Path(tempfile.mkdtemp(dir=beside.parent, prefix=".old-"))
                os.rename(self.directory, aside / "old")
                os.rename(beside, self.directory)
                shutil.rmtree(aside, ignore_errors=True)


def entry_for(text: str, examples: Sequence[tuple[Any, ...]]) -> Entry:
    """The entry of a program with these inputs, on this machine, with these versions and threads.

    Raises BackendError if there is none and none can be made.
    """
    features = [
        text,
        repr(examples),
        repr(sorted(OPTIONS.items())),
        own_code(),
        *machine(),
        str(torch.get_num_threads()),
    ]
    return _entry("steps", features, "step.so")


def kept(what: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes from `what` on this machine; it is made if it is not there or broken."""
    entry = shared_entry(what, "shared.o")
    if not entry.is_whole():
        with entry.written() as path:
            make(path)
    return entry.library


def shared_entry(what: str, name: str) -> Entry:
    """The entry of a file that is made from `what` on this machine, for all steps. Raises BackendError without a place."""
    return _entry("shared", [what, *machine()], name)


def new_folder() -> Path:
    """A new directory where code can be compiled and kept. Raises BackendError if there is none, and OSError."""
    place = cache_directory()
    if place is None:
        raise nowhere()
    parent = place / "shared"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))


def _entry(part: str, features: Sequence[str], name: str) -> Entry:
    key = hashlib.sha256("\n".join(features).encode()).hexdigest()
    directory = placed(part, key, lambda path: Entry(path, name).is_whole())
    if directory is None:
        raise nowhere()
    return Entry(directory, name)


def nowhere() -> BackendError:
    """The warning where compiled code has no place."""
    return BackendError(f"compiled code can be kept nowhere: {cache_directories().problem}", hint=ADVICE)


def entries() -> list[tuple[Path, int]]:
    """Every file or folder at the top of the cache's parts with its size in bytes, the largest first."""
    found = [path for part in _parts() for path in part.iterdir()]
    return sorted(((path, _size(path)) for path in found), key=lambda item: -item[1])


def clear_cache() -> None:
    """Remove what was compiled and measured; running graphs keep what they have loaded."""
    for part in _parts():
        shutil.rmtree(part, ignore_errors=True)


def _parts() -> list[Path]:
    found = [place / name for place in cache_directories().read for name in PARTS]
    return [path for path in found if path.is_dir()]


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(file.stat().st_size for file in files)


@cache
def own_code() -> str:
    """A name for what of Monograph's own is in compiled code: how it is made, and functions that it calls."""
    modules = [Path(module.__file__ or "") for module in _OWN]
    files = [*modules[:-1], *sorted(modules[-1].parent.iterdir())]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".h")]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@cache
def machine() -> tuple[str, ...]:
    """What compiled code depends on besides the program: torch, the processor, the platform."""
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.__version__, platform.platform(), processor_name(), _cpu_lines("flags"), capability


def processor_name() -> str:
    """The processor as the system calls it."""
    return _cpu_lines("model name") or platform.processor() or platform.machine()


def _cpu_lines(what: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return " ".join(sorted({line.partition(": ")[2] for line in lines if line.startswith(what)}))


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
