"""A checkpoint that all ranks of a group write together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import distributed
from torch.distributed.checkpoint.state_dict_saver import save

from monograph.checkpoint.archive import ARCHIVE_SUFFIX
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.ranks.boundary import on_all_ranks
from monograph.checkpoint.ranks.group import State
from monograph.checkpoint.ranks.planner import StatePlanner, local_of
from monograph.checkpoint.ranks.writer import RankWriter
from monograph.checkpoint.save import take_apart


class Background:
    """Saves that run beside the training: in a group of their own, since collectives of one group go by their order."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo")

    def copy_of(self, state: State) -> StatePlanner:
        """The state of now."""
        planner = _planner(state)
        planner.take(copy=True)
        return planner

    def save(self, copied: StatePlanner, path: Path, may_overwrite: Callable[[], bool]) -> None:
        """See `group.save_together`."""
        _save(copied, path, may_overwrite, self._group)


def save_together(state: State, path: Path, may_overwrite: Callable[[], bool]) -> None:
    """See `group.save_together`."""
    _save(_planner(state), path, may_overwrite, None)


def _planner(state: State) -> StatePlanner:
    return StatePlanner(lambda: take_apart(state() if callable(state) else state, local_of))


def _save(
    planner: StatePlanner,
    path: Path,
    may_overwrite: Callable[[], bool],
    group: distributed.ProcessGroup | None,
) -> None:
    def allowed() -> bool:
        if path.suffix == ARCHIVE_SUFFIX:
            raise Refused("several processes do not write one file", "use a path without .zip")
        return may_overwrite()

    with on_all_ranks("save", path, group=group), ExitStack() as stack:
        writer = RankWriter(path, planner, stack, allowed)
        save({}, storage_writer=writer, planner=planner, process_group=group)
