"""A process group whose collectives take some time and no processor: a thread sleeps for each, one after another.

No numbers go between processes: each gets its own back, as if all had the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist

NAME = "sleeping"
Tensors = Sequence[torch.Tensor]


class _Work(dist.Work):
    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.done, self._future = threading.Event(), torch.futures.Future[Tensors]()
        self._tensors = tensors

    def finish(self) -> None:
        self.done.set()
        self._future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self.done.wait()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def get_future(self) -> Any:
        return self._future


class SleepingGroup(dist.ProcessGroup):
    """`seconds` is what each collective takes, `count` how many there were."""

    made: ClassVar[list[SleepingGroup]] = []

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a group in Python has no store
        self._rank, self._size, self.seconds, self.count = rank, size, 0.0, 0
        self._name, self._text = "0", "default_pg"
        self._waiting: SimpleQueue[tuple[Callable[[], object], _Work]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self.made.append(self)

    def _run(self) -> None:
        while True:
            act, work = self._waiting.get()
            time.sleep(self.seconds)
            act()
            work.finish()

    def _begin(self, tensors: Tensors, act: Callable[[], object] = lambda: None) -> _Work:
        self.count += 1
        work = _Work(tensors)
        self._waiting.put((act, work))
        return work

    # torch calls a group in Python in one of the ways that it declares
    def allreduce(self, tensors: Tensors, options: Any = None) -> _Work:  # type: ignore[override]
        return self._begin(tensors)

    def broadcast(self, tensors: Tensors, options: Any = None) -> _Work:  # type: ignore[override]
        return self._begin(tensors)

    def allgather_into_tensor_coalesced(self, made: Tensors, given: Tensors, options: Any = None) -> _Work:
        def act() -> None:
            for whole, part in zip(made, given, strict=True):
                whole.view(self._size, -1).copy_(part.view(1, -1).expand(self._size, -1))

        return self._begin(made, act)

    def reduce_scatter_tensor_coalesced(self, made: Tensors, given: Tensors, options: Any = None) -> _Work:
        def act() -> None:
            for part, whole in zip(made, given, strict=True):
                part.copy_(whole.view(self._size, -1)[self._rank].view_as(part))

        return self._begin(made, act)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # as torch asks
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own name is a new type of it
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._text

    def _set_group_desc(self, text: str) -> None:
        self._text = text


def register() -> None:
    """Let `init_process_group` know it by its name."""

    def make(_store: Any, rank: int, size: int, _timeout: timedelta) -> SleepingGroup:
        return SleepingGroup(rank, size)

    dist.Backend.register_backend(NAME, make, devices=["cpu"])
