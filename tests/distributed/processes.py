"""A function run on several processes of one gloo group, and what each of them gave or raised."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

_SERVER = get_context("forkserver")  # each process is forked from one that has imported torch and Monograph
_SERVER.set_forkserver_preload(["tests.support.warmed", "tests.support.warm"])


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: its value, or its error; neither if it was killed."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    is_alive: bool = True


class Group:
    """Processes that run a function as the ranks of one group. `results` waits for them.

    The store of the group is a file, or in rank 0.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        seconds: float = 60.0,
        store_in_rank_0: bool = False,
    ) -> None:
        self._folder = TemporaryDirectory()
        folder = Path(self._folder.name)
        self.processes = [
            _SERVER.Process(
                target=_run, args=(function, arguments, rank, size, store_in_rank_0, seconds, folder)
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def results(self, *, stopped: Sequence[int] = ()) -> list[Outcome]:
        """What became of each; those that stop themselves are killed when the others have ended."""
        for rank, process in enumerate(self.processes):
            if rank not in stopped:
                process.join()
        for rank in stopped:
            os.kill(self.processes[rank].pid or 0, signal.SIGKILL)
            self.processes[rank].join()
        files = [Path(self._folder.name) / f"rank-{rank}" for rank in range(len(self.processes))]
        found = [
            pickle.loads(file.read_bytes()) if file.exists() else Outcome(is_alive=False) for file in files
        ]
        self._folder.cleanup()
        return found


def on_ranks(
    function: Callable[..., Any], *arguments: Any, ranks: int = 2, seconds: float = 60.0
) -> list[Any]:
    """What a function gives on each rank; an error of one is raised, with those of the others."""
    outcomes = Group(function, ranks, *arguments, seconds=seconds).results()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise BaseExceptionGroup("ranks have failed", errors)
    assert all(outcome.is_alive for outcome in outcomes)
    return [outcome.value for outcome in outcomes]


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    size: int,
    store_in_rank_0: bool,
    seconds: float,
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=seconds)
    store: dist.Store
    if not store_in_rank_0:
        store = dist.FileStore(str(folder / "store"), size)
        store.set_timeout(limit)
    else:
        place = folder / "port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            place.with_suffix(".new").write_text(str(store.port))
            place.with_suffix(".new").rename(place)
        while not place.exists():
            time.sleep(0.01)
        if rank:
            store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    begin = time.monotonic()
    try:
        outcome = Outcome(value=function(*arguments))
    except BaseException as error:
        traceback.print_exc()
        outcome = Outcome(error=error)
    outcome = Outcome(outcome.value, outcome.error, time.monotonic() - begin)
    try:
        raw = pickle.dumps(outcome)
    except Exception:
        raw = pickle.dumps(Outcome(error=RuntimeError(repr(outcome)), seconds=outcome.seconds))
    (folder / f"rank-{rank}.new").write_bytes(raw)
    (folder / f"rank-{rank}.new").rename(folder / f"rank-{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the end of the group, which waits for others
