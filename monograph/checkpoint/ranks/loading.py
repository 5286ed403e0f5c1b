"""The state of a rank out of a checkpoint, its tensors spread as those of another state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from monograph.checkpoint.bytes import Row
from monograph.checkpoint.errors import Damaged, path_text
from monograph.checkpoint.load import HINT, loading
from monograph.checkpoint.ranks.boundary import failure, on_all_ranks
from monograph.checkpoint.ranks.group import this_process
from monograph.checkpoint.ranks.reader import RankReader
from monograph.checkpoint.read import state_of
from monograph.checkpoint.save import Checkpoint
from monograph.layout import contiguous_stride


class _LikePlanner(DefaultLoadPlanner):
    """Makes the tensors that are loaded into, by what is stored and by those of another state."""

    def __init__(self, like: Mapping[str, Any], reader: RankReader) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._like = like
        self._reader = reader
        self.made: dict[str, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        spread = dict(_dtensors(self._like, ()))
        for name, source in self._reader.sources.items():
            live = spread.get(name)
            if live is None:
                stride = (isinstance(source, Row) and source.stride) or contiguous_stride(source.shape)
                self.made[name] = torch.empty_strided(
                    source.shape, stride, dtype=self._reader.dtypes[name], device="cpu"
                )
            elif tuple(live.shape) != source.shape:
                raise Damaged(f"{name} is of shape {source.shape}; here it is {tuple(live.shape)}")
            else:
                self.made[name] = torch.empty_like(live.detach(), dtype=self._reader.dtypes[name])
        super().set_up_planner(self.made, metadata, is_coordinator)


def _dtensors(value: object, path: tuple[object, ...]) -> Iterator[tuple[str, DTensor]]:
    """The DTensors in a state, by the names that stored tensors have."""
    if isinstance(value, DTensor):
        yield path_text(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _dtensors(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _dtensors(item, (*path, index))


def load_like(path: Path, like: Mapping[str, Any]) -> Checkpoint:
    """See `group.load_like`."""
    process = this_process()
    with ExitStack() as stack:
        reader = RankReader(path, process, stack)
        planner = _LikePlanner(like, reader)
        boundary = on_all_ranks if process.size > 1 else _alone
        with boundary("load", path, HINT):
            load({}, storage_reader=reader, planner=planner, no_dist=process.size == 1)
        with loading(path):
            state = state_of(reader.manifest, reader.tree, planner.made)
        return Checkpoint(state, path, reader.manifest.about)


@contextmanager
def _alone(verb: str, path: Path, hint: str) -> Iterator[None]:
    """The boundary in a process by itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is no group
            yield
    except CheckpointException as error:
        raise failure(verb, path, error, hint, alone=True) from None
