"""The storage that torch.distributed.checkpoint reads from: what a rank needs, each tensor verified by its digest."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from monograph.checkpoint.archive import ArchiveEntries, opened_entries
from monograph.checkpoint.bytes import RAW, Box, Joined, Row
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json
from monograph.checkpoint.manifest import ARTIFACT, Manifest, from_bytes
from monograph.checkpoint.read import Process, check_names, manifest_bytes, read_file, sources, tree_for


class RankReader(StorageReader):
    """Reads the state of one process out of a checkpoint, of one process or of many. Its `stack` is left after that."""

    def __init__(self, path: Path, process: Process, stack: ExitStack) -> None:
        self._path = path
        self._process = process
        self._stack = stack
        self._entries: ArchiveEntries
        self._rows: dict[tuple[str, tuple[int, ...]], Row] = {}  # by the tensor, and the place in it
        self.manifest: Manifest
        self.tree: Json = None
        self.dtypes: dict[str, torch.dtype] = {}
        self.sources: Mapping[str, Row | Joined] = {}
        self.trouble: Exception | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def read_metadata(self) -> Metadata:
        """What is stored. What goes wrong is raised a little later: torch would say of it that metadata are missing."""
        try:
            return Metadata(dict(self._read_manifest()))
        except Exception as error:
            self.trouble = error
            return Metadata({})

    def _read_manifest(self) -> Mapping[str, Any]:
        entries = self._stack.enter_context(opened_entries(self._path))
        manifest = self.manifest = from_bytes(manifest_bytes(entries))
        if manifest.kind == ARTIFACT:
            raise Damaged("it is an artifact; load it with mg.load(path)")
        check_names(entries)
        # a saver may replace it meanwhile
        names = [item.name for item in manifest.entries]
        self._entries = self._stack.enter_context(entries.opened(names))
        self.tree = manifest.tree
        if manifest.ranks is not None:
            self.tree = tree_for(manifest.ranks, self._process)
        rows = {row.name: row for file in manifest.files for row in file.rows}
        found = {}
        self.sources = sources(manifest, self.tree, self._process)
        for name, source in self.sources.items():
            joined = source if isinstance(source, Joined) else _whole(source)
            self._rows |= {(name, box.offset): rows[box.row] for box in joined.boxes}
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offset), torch.Size(rows[box.row].shape))
                for box in joined.boxes
            ]
            self.dtypes[name] = rows[joined.boxes[0].row].dtype
            properties = TensorProperties(dtype=self.dtypes[name])
            found[name] = TensorStorageMetadata(properties, torch.Size(joined.shape), chunks)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        if self.trouble is not None:
            raise self.trouble

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            index = item.storage_index
            wanted[self._rows[index.fqn, tuple(index.offset or ())].name].append(item)
        for file in self.manifest.files:
            if any(row.name in wanted for row in file.rows):
                for name, tensor in read_file(self._entries, file, wanted):
                    for item in wanted.get(name, ()):
                        _copy(tensor, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _whole(row: Row) -> Joined:
    return Joined(row.shape, (Box(row.name, (0,) * len(row.shape)),))


def _copy(stored: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    raw = RAW[stored.dtype.itemsize]  # some dtypes have no kernel that copies
    target.view(raw).copy_(stored.view(raw))
    planner.commit_tensor(item, target)
