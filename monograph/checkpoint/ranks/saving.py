"""A checkpoint that all ranks of a group write together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch.distributed.checkpoint.state_dict_saver import save

from monograph.checkpoint.archive import ARCHIVE_SUFFIX
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.ranks.boundary import on_all_ranks
from monograph.checkpoint.ranks.group import State
from monograph.checkpoint.ranks.planner import StatePlanner, local_of
from monograph.checkpoint.ranks.writer import RankWriter
from monograph.checkpoint.save import take_apart
from monograph.checkpoint.write import Parts


def save_together(state: State, path: Path, may_overwrite: Callable[[], bool]) -> None:
    """See `group.save_together`."""

    def parts() -> Parts:
        if path.suffix == ARCHIVE_SUFFIX:
            raise Refused("several processes do not write one file", "use a path without .zip")
        return take_apart(state() if callable(state) else state, local_of)

    planner = StatePlanner(parts)
    with on_all_ranks("save", path), ExitStack() as stack:
        writer = RankWriter(path, planner, stack, may_overwrite)
        save({}, storage_writer=writer, planner=planner)
