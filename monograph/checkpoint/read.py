"""Reading a checkpoint or an artifact: the manifest, then each file it names, verified before anything is made of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from monograph.checkpoint.archive import ArchiveEntries, Directory
from monograph.checkpoint.bytes import Joined, Row
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.files import MANIFEST, is_ours, opened
from monograph.checkpoint.leaves import Json
from monograph.checkpoint.manifest import (
    ABOUT_KEY,
    MAX_MANIFEST_BYTES,
    Document,
    Manifest,
    RankStates,
    TensorFile,
    from_bytes,
    own_row,
)
from monograph.checkpoint.rebuild import rebuild, tensor_names, with_keys_of
from monograph.checkpoint.tensor_file import check_header, read_hashed, read_tensors


@dataclass(frozen=True)
class Process:
    """One of several that read a checkpoint."""

    rank: int = 0
    size: int = 1


ALONE: Final = Process()


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


def read(entries: ArchiveEntries, raw: bytes, process: Process) -> Content:
    """What a manifest describes; `Damaged` for whatever does not fit together. Of many states, that of a process."""
    manifest = from_bytes(raw)
    check_names(entries)
    needed, memory = sum(file.num_bytes for file in manifest.entries), memory_bytes()
    if needed > memory:
        raise Damaged(f"it takes {needed:,} bytes, and the memory of this machine has {memory:,}")
    tensors: dict[str, torch.Tensor] = {}
    with entries.opened([item.name for item in manifest.entries]) as files:
        documents = read_documents(files, manifest)
        for file in manifest.files:
            tensors.update(read_file(files, file))
    tree = manifest.tree
    if manifest.ranks is not None:
        tree = tree_for(manifest.ranks, process)
        tensors = {
            name: source.of(tensors) if isinstance(source, Joined) else tensors[source.name]
            for name, source in sources(manifest, tree, process).items()
        }
    return Content(state_of(manifest, tree, tensors), manifest, documents)


def state_of(manifest: Manifest, tree: Json, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The state that a tree and its tensors make."""
    state = rebuild(tree, tensors)
    if not isinstance(state, dict):
        raise Damaged("its tree is no dict")
    if tree is manifest.tree and manifest.about != state.get(ABOUT_KEY, {}):
        raise Damaged(f"what it says of the graph is not what the state says under {ABOUT_KEY!r}")
    return state


def tree_for(ranks: RankStates, process: Process) -> Json:
    """The tree of a process: its own if as many saved it, else that of one of them, and what others have besides."""
    tree = ranks.trees[ranks.tree_of[process.rank % len(ranks.tree_of)]]
    if process.size != len(ranks.tree_of):
        for other in ranks.trees:
            tree = with_keys_of(tree, other)
    return tree


def sources(manifest: Manifest, tree: Json, process: Process) -> dict[str, Row | Joined]:
    """Where each tensor that a tree names is stored: in a row, or in parts."""
    rows: dict[str, Row] = {row.name: row for file in manifest.files for row in file.rows}
    found: dict[str, Row | Joined] = {}
    ranks = manifest.ranks or RankStates((tree,), (0,))
    size = len(ranks.tree_of)
    for name in tensor_names(tree):
        stored = [name]
        if name in ranks.own:
            first = process.rank % size
            stored = [own_row(name, rank) for rank in (first, *range(size))]
        source = next((rows[row] for row in stored if row in rows), None) or ranks.joined.get(name)
        if source is None:
            raise Damaged(f"the tree names a tensor {name!r} that is not stored")
        found[name] = source
    return found


def read_documents(entries: ArchiveEntries, manifest: Manifest) -> Mapping[str, bytes]:
    """The documents of an artifact, verified; its tensors are not looked at."""
    return {item.name: _read_document(entries, item) for item in manifest.documents}


def is_complete(path: Path) -> bool:
    """True for a directory that a save has finished, by its manifest and the sizes of its files."""
    try:
        with opened(path) as fd:
            entries = Directory(fd)
            manifest = from_bytes(manifest_bytes(entries))
            check_names(entries)
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


def read_file(
    entries: ArchiveEntries, file: TensorFile, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, verified; all of them, or at least those that are wanted, a few at a time."""
    with entries.open_entry(file.name) as (fd, num_bytes):
        _check_size(file, num_bytes)
        try:
            if file.digests:
                check_header(fd, num_bytes, file.rows)
                wanted = {row.name for row in file.rows} if wanted is None else wanted
                yield from read_hashed(fd, file.rows, file.digests, wanted)
                return
            tensors, sha256 = read_tensors(fd, num_bytes, file.rows)
        except Damaged as error:
            raise Damaged(f"{file.name}: {error}") from None
    if sha256 != file.sha256:
        raise Damaged(f"{file.name} was changed: its SHA-256 does not match")
    yield from tensors.items()


def check_names(entries: ArchiveEntries) -> None:
    """`Damaged` if there are files of others."""
    foreign = next((name for name in entries.names() if not is_ours(name)), None)
    if foreign is not None:
        raise Damaged(f"it holds {foreign!r}, which is no part of it")


def _check_size(file: TensorFile | Document, num_bytes: int) -> None:
    if num_bytes != file.num_bytes:
        raise Damaged(f"{file.name} has {num_bytes:,} bytes instead of {file.num_bytes:,}")


def memory_bytes() -> int:
    """What the machine has: a file with holes can say that it is larger than any disk."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
