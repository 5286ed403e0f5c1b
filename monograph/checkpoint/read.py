"""Reading a checkpoint or an artifact: the manifest, then each file it names, verified before anything is made of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monograph.checkpoint.archive import ArchiveEntries, Directory
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.files import MANIFEST, is_ours, opened
from monograph.checkpoint.manifest import (
    ABOUT_KEY,
    MAX_MANIFEST_BYTES,
    Document,
    Manifest,
    TensorFile,
    from_bytes,
)
from monograph.checkpoint.rebuild import rebuild
from monograph.checkpoint.tensor_file import read_tensors


@dataclass(frozen=True)
class Content:
    """What a checkpoint or an artifact holds."""

    state: dict[Any, Any]
    manifest: Manifest
    documents: Mapping[str, bytes]


def manifest_bytes(entries: ArchiveEntries) -> bytes:
    """The text of the manifest, whatever it says."""
    with entries.open_entry(MANIFEST) as (fd, num_bytes):
        if num_bytes > MAX_MANIFEST_BYTES:
            raise Damaged(f"{MANIFEST} has {num_bytes:,} bytes, more than it may have")
        return _read_all(fd, num_bytes)


def read(entries: ArchiveEntries, raw: bytes) -> Content:
    """What a manifest describes; `Damaged` for whatever does not fit together."""
    manifest = from_bytes(raw)
    _check_names(entries)
    needed, memory = sum(file.num_bytes for file in manifest.entries), memory_bytes()
    if needed > memory:
        raise Damaged(f"it takes {needed:,} bytes, and the memory of this machine has {memory:,}")
    tensors: dict[str, torch.Tensor] = {}
    with entries.opened([item.name for item in manifest.entries]) as files:
        documents = read_documents(files, manifest)
        for file in manifest.files:
            tensors |= _read_file(files, file)
    state = rebuild(manifest.tree, tensors)
    if not isinstance(state, dict):
        raise Damaged("its tree is no dict")
    if manifest.about != state.get(ABOUT_KEY, {}):
        raise Damaged(f"what it says of the graph is not what the state says under {ABOUT_KEY!r}")
    return Content(state, manifest, documents)


def read_documents(entries: ArchiveEntries, manifest: Manifest) -> Mapping[str, bytes]:
    """The documents of an artifact, verified; its tensors are not looked at."""
    return {item.name: _read_document(entries, item) for item in manifest.documents}


def is_complete(path: Path) -> bool:
    """True for a directory that a save has finished, by its manifest and the sizes of its files."""
    try:
        with opened(path) as fd:
            entries = Directory(fd)
            manifest = from_bytes(manifest_bytes(entries))
            _check_names(entries)
            for file in manifest.entries:
                with entries.open_entry(file.name) as (_file, num_bytes):
                    _check_size(file, num_bytes)
    except (Damaged, OSError):
        return False
    return True


def _read_document(entries: ArchiveEntries, document: Document) -> bytes:
    with entries.open_entry(document.name) as (fd, num_bytes):
        _check_size(document, num_bytes)
        raw = _read_all(fd, num_bytes)
    if hashlib.sha256(raw).hexdigest() != document.sha256:
        raise Damaged(f"{document.name} was changed: its SHA-256 does not match")
    return raw


def _read_all(fd: int, num_bytes: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read(num_bytes)


def _read_file(entries: ArchiveEntries, file: TensorFile) -> dict[str, torch.Tensor]:
    with entries.open_entry(file.name) as (fd, num_bytes):
        _check_size(file, num_bytes)
        try:
            tensors, sha256 = read_tensors(fd, num_bytes, file.rows)
        except Damaged as error:
            raise Damaged(f"{file.name}: {error}") from None
    if sha256 != file.sha256:
        raise Damaged(f"{file.name} was changed: its SHA-256 does not match")
    return tensors


def _check_names(entries: ArchiveEntries) -> None:
    foreign = next((name for name in entries.names() if not is_ours(name)), None)
    if foreign is not None:
        raise Damaged(f"it holds {foreign!r}, which is no part of it")


def _check_size(file: TensorFile | Document, num_bytes: int) -> None:
    if num_bytes != file.num_bytes:
        raise Damaged(f"{file.name} has {num_bytes:,} bytes instead of {file.num_bytes:,}")


def memory_bytes() -> int:
    """What the machine has: a file with holes can say that it is larger than any disk."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
