"""Reading a checkpoint: the manifest, then each file it names, verified before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monograph.storage.faults import Damaged
from monograph.storage.files import MANIFEST, foreign_files, member, opened
from monograph.storage.manifest import ABOUT_KEY, MAX_MANIFEST_BYTES, TensorFile, from_bytes
from monograph.storage.rebuild import rebuild
from monograph.storage.tensor_file import read_tensors


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds."""

    state: dict[Any, Any]
    about: Mapping[str, Any]


def manifest_bytes(directory: int) -> bytes:
    """The text of the manifest, whatever it says."""
    with member(MANIFEST, directory) as (fd, num_bytes):
        if num_bytes > MAX_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST} has {num_bytes:,} bytes, more than a checkpoint's may")
        with open(fd, "rb", closefd=False) as file:
            return file.read(num_bytes)


def read(directory: int, raw: bytes) -> Content:
    """The state that a manifest describes; `Damaged` for whatever does not fit together."""
    manifest = from_bytes(raw)
    _check_names(directory)
    needed, memory = sum(file.num_bytes for file in manifest.files), _memory_bytes()
    if needed > memory:
        raise Damaged(f"it takes {needed:,} bytes, and the memory of this machine has {memory:,}")
    tensors: dict[str, torch.Tensor] = {}
    for file in manifest.files:
        tensors |= _read_file(directory, file)
    state = rebuild(manifest.tree, tensors)
    if not isinstance(state, dict):
        raise Damaged("its tree is no dict")
    if manifest.about != state.get(ABOUT_KEY, {}):
        raise Damaged(f"what it says of the graph is not what the state says under {ABOUT_KEY!r}")
    return Content(state, manifest.about)


def is_complete(path: Path) -> bool:
    """True for a directory that a save has finished, by its manifest and the sizes of its files."""
    try:
        with opened(path) as fd:
            manifest = from_bytes(manifest_bytes(fd))
            _check_names(fd)
            for file in manifest.files:
                with member(file.name, fd) as (_file, num_bytes):
                    _check_size(file, num_bytes)
    except (Damaged, OSError):
        return False
    return True


def _read_file(directory: int, file: TensorFile) -> dict[str, torch.Tensor]:
    with member(file.name, directory) as (fd, num_bytes):
        _check_size(file, num_bytes)
        try:
            tensors, sha256 = read_tensors(fd, num_bytes, file.rows)
        except Damaged as error:
            raise Damaged(f"{file.name}: {error}") from None
    if sha256 != file.sha256:
        raise Damaged(f"{file.name} was changed: its SHA-256 does not match")
    return tensors


def _check_names(directory: int) -> None:
    foreign = foreign_files(directory)
    if foreign:
        raise Damaged(f"it holds {foreign[0]!r}, which is no part of it")


def _check_size(file: TensorFile, num_bytes: int) -> None:
    if num_bytes != file.num_bytes:
        raise Damaged(f"{file.name} has {num_bytes:,} bytes instead of {file.num_bytes:,}")


def _memory_bytes() -> int:
    """What the machine has: a file with holes can say that it is larger than any disk."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
