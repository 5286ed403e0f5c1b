"""Before the ranks of a graph have met: which of them will not come, since it could not build its step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from monograph.compat.distributed.groups import store_of, whole_group
from monograph.distributed.agreement.others import UNBUILT, Unbuilt, error_line
from monograph.distributed.agreement.ranks import in_time
from monograph.errors import DistributedError

_START: Final = "TORCHELASTIC_RESTART_COUNT"  # of torchrun, which may keep the store of an earlier one


class Beginning:
    """What this rank has said of the first builds of a graph, and how it hears of those of others while it waits for them.

    Functions may define a class again, whose graphs have the names of those before: each rank counts them.
    """

    def __init__(self, name: str) -> None:
        """`name` is that of the graph, after that of its class."""
        self._rank, self._failed = distributed.get_rank(), 0
        of_name = PrefixStore(
            f"monograph/{name}/beginning/{os.environ.get(_START, '')}", store_of(whole_group())
        )
        self._store: Any = PrefixStore(str(of_name.add(f"graphs/{self._rank}", 1)), of_name)
        self._heard: DistributedError | None = None  # of another rank, which has said so itself

    def begins(self) -> None:
        """This rank builds: it said otherwise before, if it has failed."""
        if self._failed and (said := self._said()) is not None and said.rank == self._rank:
            self._store.set(UNBUILT, Unbuilt(self._rank, 0, "").text)

    def not_built(self, error: BaseException) -> None:
        """Say to those that wait for this rank that it has no build."""
        self._failed += 1
        if error is self._heard:
            return
        said = Unbuilt(self._rank, self._failed, error_line(error)).text
        in_time(lambda: bool(self._store.set(UNBUILT, said)))

    def look(self) -> None:
        """Raises DistributedError if another rank has none; all may have failed alike before."""
        if (said := self._said()) is not None and said.times > self._failed:
            self._heard = said.failure(f"rank {said.rank}")
            raise self._heard

    def last(self, _ranks: Sequence[int]) -> str:
        """What they did last."""
        return "there is no step yet"

    def _said(self) -> Unbuilt | None:
        return Unbuilt.of(self._store.get(UNBUILT).decode()) if self._store.check([UNBUILT]) else None
