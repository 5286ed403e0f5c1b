"""The storage that torch.distributed.checkpoint writes to: a file of each rank, and one rename as the commit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from monograph.checkpoint.bytes import Box, Joined, Row, row_of
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.files import new_file, opened_to_write
from monograph.checkpoint.manifest import RANKS, Manifest, RankStates, TensorFile, to_bytes
from monograph.checkpoint.ranks.planner import StatePlanner
from monograph.checkpoint.tensor_file import num_bytes_of, write_hashed
from monograph.checkpoint.write import Place, existing, parents_made, place_beside, place_inside


@dataclass(frozen=True)
class RankFile:
    """The file that a rank writes: the coordinator decides."""

    directory: str
    name: str


@dataclass(frozen=True)
class Stored:
    """A tensor or a part of one, as a rank has written it."""

    row: Row
    sha256: str
    file: str


class RankWriter(StorageWriter):
    """Writes into a directory that nobody sees before the manifest is there. Its `stack` is left after the save."""

    def __init__(
        self, path: Path, planner: StatePlanner, stack: ExitStack, may_overwrite: Callable[[], bool]
    ) -> None:
        self._path = path
        self._planner = planner
        self._stack = stack
        self._may_overwrite = may_overwrite
        self._place: Place  # of the coordinator

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        place = self._place = self._stack.enter_context(_place(self._path, overwrite=self._may_overwrite()))
        directory = place.directory.name  # beside the path, wherever each rank sees it
        return [
            replace(plan, storage_data=RankFile(directory, f"tensors-{place.token}-{rank:05}.safetensors"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file: RankFile = plan.storage_data
        # large elements first, so that each tensor is aligned to its own
        items = sorted(plan.items, key=lambda item: -_dtype_bytes(item))
        tensors: list[Any] = [planner.resolve_data(item) for item in items]
        rows = tuple(
            replace(row_of("", tensor), name=_row_name(item))
            for item, tensor in zip(items, tensors, strict=True)
        )
        directory = self._path.with_name(file.directory)
        if not directory.is_dir():
            raise Refused(
                f'it does not see "{directory}", which rank 0 has made',
                "save to a path in a file system that all ranks share",
            )
        with opened_to_write(directory) as fd, new_file(file.name, fd) as target:
            digests = write_hashed(target, rows, tensors)
        self._planner.parts.check_unchanged()
        return [
            WriteResult(item.index, row.num_bytes, Stored(row, digest, file.name))
            for item, row, digest in zip(items, rows, digests, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        described = self._planner.described
        boxes: dict[str, list[Box]] = {}
        files = []
        for written in filter(None, results):
            stored: list[Stored] = [result.storage_data for result in written]
            rows = tuple(item.row for item in stored)
            digests = tuple(item.sha256 for item in stored)
            files.append(TensorFile(stored[0].file, num_bytes_of(rows), "", rows, digests))
            for result, row in zip(written, rows, strict=True):
                name = result.index.fqn
                if row.name != name:
                    boxes.setdefault(name, []).append(Box(row.name, tuple(result.index.offset or ())))
        sizes: Any = metadata.state_dict_metadata
        joined = {name: Joined(tuple(sizes[name].size), tuple(found)) for name, found in boxes.items()}
        names = Counter(row.name for file in files for row in file.rows)
        if twice := [name for name, count in names.items() if count > 1]:
            raise Refused(f"{twice[0]!r} would be the name of two tensors", "rename one of them")
        ranks = RankStates(described.trees, described.tree_of, described.own, joined)
        manifest = Manifest(described.about, tuple(files), described.trees[0], RANKS, ranks=ranks)
        self._place.commit(to_bytes(manifest))
        self._stack.close()


@contextmanager
def _place(path: Path, *, overwrite: bool) -> Iterator[Place]:
    """Where the ranks write."""
    if overwrite and path.is_dir():
        with place_inside(path) as place:
            yield place
        return
    if os.path.lexists(path):
        raise existing(overwrite)
    with parents_made(path), place_beside(path) as place:
        yield place


def _dtype_bytes(item: WriteItem) -> int:
    return item.tensor_data.properties.dtype.itemsize if item.tensor_data is not None else 0


def _row_name(item: WriteItem) -> str:
    """The name of a whole tensor, or that with the place of a part."""
    name, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk.sizes == data.size:
        return name
    box = ",".join(f"{o}:{o + n}" for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    return f"{name}[{box}]"
