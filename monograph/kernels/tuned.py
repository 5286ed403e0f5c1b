"""Kernel choices and their memory: what was measured once on a machine is never measured there again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from monograph.compat.distributed.groups import num_processes, said_first
from monograph.compat.inductor.directories import is_private
from monograph.compat.inductor.disk_cache import machine, own_code, placed

_LOGGER = logging.getLogger("monograph")
_MARGIN = 0.95  # a challenger must win by 5 %: what is as fast as the default is not worth other numbers

# Documented cache: what this process found out or read, by file. A choice holds for a process even if its memory on
# disk is cleared or cannot be written.
_IN_PROCESS: dict[Path, Verdict] = {}
_AGREED: set[Path] = set()  # those among them that the processes of a group share


@dataclass(frozen=True)
class Verdict:
    """What timing found: the seconds of each candidate by name, the default first, and which one is taken."""

    winner: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TunedKernel:
    """The kernel of all nodes of a program that do one thing."""

    op: str
    operands: tuple[str, ...]
    default: str
    winner: str
    seconds: Mapping[str, float]
    nodes: tuple[str, ...]  # by their names before the choice

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {_microseconds(item)}" for name, item in sorted(self.seconds.items(), key=_second)
        )
        count = f", {len(self.nodes)} times" if len(self.nodes) > 1 else ""
        operands = f"({', '.join(self.operands)})" if self.operands else ""
        return f"{self.op}{operands}{count}: {self.winner} ({times or 'not measured'})"


def verdict_on(seconds: Mapping[str, float], default: str) -> Verdict:
    """The fastest form, if it is clearly faster than the default."""
    fastest = min(seconds, key=seconds.__getitem__, default=default)
    if fastest != default and seconds[fastest] < _MARGIN * seconds[default]:
        return Verdict(fastest, dict(seconds))
    return Verdict(default, dict(seconds))


def remembered(
    features: Collection[str], names: Collection[str], measure: Callable[[], Mapping[str, float]]
) -> Verdict:
    """The choice for what `features` describe, among candidates of these names, the default first; measured if unknown.

    The first process that stores a choice decides for all: those that use this memory, and those of a process group.
    """
    path = _path((*features, *names))
    together = num_processes() > 1
    if path not in _IN_PROCESS or (together and path not in _AGREED):
        key = hashlib.sha256("\n".join((*features, *names)).encode()).hexdigest()
        found = _parsed(said_first(key), names) if together else None
        if found is None:
            found = _IN_PROCESS.get(path) or _found_here(path, features, names, measure)
            if together:
                found = _parsed(said_first(key, json.dumps(asdict(found))), names) or found
        if together:
            _AGREED.add(path)
        _IN_PROCESS[path] = found
    return _IN_PROCESS[path]


def _found_here(
    path: Path,
    features: Collection[str],
    names: Collection[str],
    measure: Callable[[], Mapping[str, float]],
) -> Verdict:
    if (found := _read(path, names)) is not None:
        return found
    seconds = measure()
    verdict = verdict_on(seconds, next(iter(names)))
    return _kept(path, verdict, features, names) if seconds else verdict


def is_known(features: Collection[str], names: Collection[str]) -> bool:
    """True if there is a choice already."""
    path = _path((*features, *names))
    return path in _IN_PROCESS or path.exists()


def _path(features: Collection[str]) -> Path:
    settings = str(torch.get_num_threads()), torch.get_float32_matmul_precision()
    everything = [*machine(), own_code(), *settings, *features]
    key = hashlib.sha256("\n".join(everything).encode()).hexdigest()
    # without a place on disk a choice holds for the process
    return placed("kernels", f"{key}.json", Path.exists) or Path("kernels", f"{key}.json")


def _read(path: Path, names: Collection[str], *, level: int = logging.WARNING) -> Verdict | None:
    """What is on disk; None, with a message if it is damaged, where that is no choice among these candidates."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    if not is_private(path):
        _LOGGER.log(level, "the kernel choice in %s may be of another user; it is measured again", path)
        return None
    if (verdict := _parsed(text, names)) is None:
        _LOGGER.log(level, "the kernel choice in %s is damaged; it is measured again", path)
    return verdict


def _parsed(text: str | bytes, names: Collection[str]) -> Verdict | None:
    try:
        stored = json.loads(text)
        verdict = Verdict(stored["winner"], {name: float(item) for name, item in stored["seconds"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return verdict if verdict.winner in names and set(verdict.seconds) <= set(names) else None


def _kept(path: Path, verdict: Verdict, features: Collection[str], names: Collection[str]) -> Verdict:
    """Write a choice, whole or not at all; if another process was first, its choice holds."""
    if not path.is_absolute():
        return verdict
    text = json.dumps({**asdict(verdict), "facts": list(features)}, indent=1)
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new-", delete=False) as file:
            beside = Path(file.name)
            file.write(text)
        try:
            os.link(beside, path)
        except FileExistsError:
            # what is damaged was reported when it was read first
            if (theirs := _read(path, names, level=logging.DEBUG)) is not None:
                return theirs
            os.replace(beside, path)
    except OSError as error:
        _LOGGER.warning("kernel choices cannot be kept in %s: %s", path.parent, error)
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
    return verdict


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def _second(item: tuple[str, Any]) -> Any:
    return item[1]
