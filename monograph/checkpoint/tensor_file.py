"""One safetensors file: written and hashed in one go, and read into memory of our own while it is hashed.

The manifest holds all that the file's header says, so a reader makes the header anew and compares; it parses nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from monograph.checkpoint.bytes import CODES, Row, on_host
from monograph.checkpoint.errors import Damaged

CHUNK_BYTES: Final = 1 << 20  # hashed while it is still in the processor's cache
CHUNK_VIEWS: Final = 512  # below the smallest limit of readv
ARENA_BYTES: Final = 32 << 20
ALIGNMENT: Final = 64  # torch's own: some kernels round differently on other addresses


@dataclass(frozen=True)
class Written:
    """What the manifest says of the bytes of a file."""

    num_bytes: int
    sha256: str


def header(rows: Sequence[Row]) -> bytes:
    """The first bytes of the file of these tensors: the length of a JSON object, and the object."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for row in rows:
        start, end = end, end + row.num_bytes
        entries[row.name] = {
            "dtype": CODES[row.dtype],
            "shape": row.stored_shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(fd: int, rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> Written:
    """Write a whole file. What is hashed is what is written, even if another thread changes a tensor meanwhile."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    hosts = [on_host(tensor, row) for tensor, row in zip(tensors, rows, strict=True)]
    filled = num_bytes = 0
    for piece in _pieces([memoryview(header(rows)), *map(bytes_of, hosts)]):
        if filled + len(piece) > CHUNK_BYTES:
            _write(fd, chunk[:filled], digest)
            filled = 0
        chunk[filled : filled + len(piece)] = piece
        filled += len(piece)
        num_bytes += len(piece)
    _write(fd, chunk[:filled], digest)
    return Written(num_bytes, digest.hexdigest())


def write_hashed(fd: int, rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Write a whole file; the SHA-256 of each tensor, for readers that need some of them."""
    write_all(fd, header(rows))
    chunk = memoryview(bytearray(CHUNK_BYTES))
    digests = []
    for tensor, row in zip(tensors, rows, strict=True):
        digest, host = hashlib.sha256(), on_host(tensor, row)
        for piece in _pieces([bytes_of(host)]):
            chunk[: len(piece)] = piece
            _write(fd, chunk[: len(piece)], digest)
        digests.append(digest.hexdigest())
    return tuple(digests)


def num_bytes_of(rows: Sequence[Row]) -> int:
    """How long the file of these tensors is."""
    return len(header(rows)) + sum(row.num_bytes for row in rows)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write, in as many calls as the system takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_tensors(fd: int, num_bytes: int, rows: Sequence[Row]) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a file of so many bytes, and the SHA-256 of all that was read."""
    digest = hashlib.sha256()
    check_header(fd, num_bytes, rows, digest)
    tensors: dict[str, torch.Tensor] = {}
    for arena in _arenas(rows):
        tensors |= _read_arena(fd, arena, digest)
    return tensors, digest.hexdigest()


def check_header(fd: int, num_bytes: int, rows: Sequence[Row], digest: hashlib._Hash | None = None) -> int:
    """Read what stands before the first tensor, and how long that is; `Damaged` if the file is not that of these rows."""
    start = header(rows)
    if len(start) + sum(row.num_bytes for row in rows) != num_bytes:
        raise Damaged("its size is not that of its tensors")  # before any memory is asked for
    found = bytearray(len(start))
    _read(fd, [memoryview(found)], digest)
    if found != start:
        raise Damaged("its header is not the one that the manifest describes")
    return len(start)


def read_hashed(
    fd: int, rows: Sequence[Row], digests: Sequence[str], wanted: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted tensors, each verified by itself, of a file that stands after its header."""
    expected = {row.name: digest for row, digest in zip(rows, digests, strict=True)}
    place = os.lseek(fd, 0, os.SEEK_CUR)
    for is_wanted, run in groupby(rows, lambda row: row.name in wanted):
        for arena in _arenas(list(run)):
            if is_wanted:
                os.lseek(fd, place, os.SEEK_SET)
                for name, tensor in _read_arena(fd, arena, None).items():
                    if hashlib.sha256(bytes_of(tensor)).hexdigest() != expected[name]:
                        raise Damaged(f"the tensor {name!r} was changed: its SHA-256 does not match")
                    yield name, tensor
            place += sum(row.num_bytes for row in arena)


def _read_arena(fd: int, rows: Sequence[Row], digest: hashlib._Hash | None) -> dict[str, torch.Tensor]:
    """Read neighbours into one block of memory, each at an aligned place."""
    places, end = [], 0
    for row in rows:
        places.append(slice(end, end + row.num_bytes))
        end += row.num_bytes + -row.num_bytes % ALIGNMENT
    memory = _memory(end)
    view = memoryview(memory)
    for batch in _batches(_pieces([view[place] for place in places])):
        _read(fd, batch, digest)
    return {row.name: _tensor(memory, place.start, row) for row, place in zip(rows, places, strict=True)}


def _tensor(memory: mmap.mmap, offset: int, row: Row) -> torch.Tensor:
    """The tensor at a place of the memory; it keeps the memory alive."""
    count = row.num_bytes // row.dtype.itemsize
    if count == 0:
        return torch.empty(row.shape, dtype=row.dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=row.dtype, count=count, offset=offset)
    return flat.view(row.shape) if row.stride is None else flat.as_strided(row.shape, row.stride)


def _memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory; in huge pages where the system has them, since faulting small ones in costs as much as reading."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _arenas(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Neighbours that share memory: bounded, since one tensor that lives on keeps all of it."""
    arena: list[Row] = []
    num_bytes = 0
    for row in rows:
        if arena and num_bytes + row.num_bytes > ARENA_BYTES:
            yield arena
            arena, num_bytes = [], 0
        arena.append(row)
        num_bytes += row.num_bytes
    if arena:
        yield arena


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host that fills a block; valid while the tensor lives."""
    block = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(block).cast("B")


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The views in parts of at most one chunk."""
    for view in views:
        if len(view) <= CHUNK_BYTES:
            yield view
        else:
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]


def _batches(pieces: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces for one call: about a chunk, and not too many."""
    batch: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if batch and (num_bytes + len(piece) > CHUNK_BYTES or len(batch) == CHUNK_VIEWS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += len(piece)
    if batch:
        yield batch


def _write(fd: int, data: memoryview, digest: hashlib._Hash) -> None:
    digest.update(data)
    write_all(fd, data)


def _read(fd: int, views: list[memoryview], digest: hashlib._Hash | None) -> None:
    """Fill the views one after the other; the system may take several calls for it."""
    left, missing = views, sum(map(len, views))
    while missing:
        done = os.readv(fd, left)
        if done == 0:
            raise Damaged("it became shorter while it was read")
        missing -= done
        left = _after(left, done) if missing else []
    if digest is not None:
        for view in views:
            digest.update(view)


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views after so many bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
