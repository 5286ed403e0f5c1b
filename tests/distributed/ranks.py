"""Functions run in several processes at once, over gloo on this machine, each with one thread."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = datetime.timedelta(seconds=60)


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """What `function(rank, *args)` returns in each of `ranks` processes that have one group. Fails if one of them raises.

    Results are pickled: tensors come back as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(_run, (folder, ranks, function, args), nprocs=ranks, join=False)
        try:
            while not context.join():
                pass
        except Exception as error:
            found = [_left(folder, rank) for rank in range(ranks)]
            told = "\n".join(item for item in found if isinstance(item, str) and "Traceback" in item)
            raise AssertionError(told or str(error)) from None
        return [_left(folder, rank) for rank in range(ranks)]


def _left(folder: str, rank: int) -> Any:
    path = os.path.join(folder, f"result{rank}")
    return torch.load(path, weights_only=False) if os.path.exists(path) else None


def _run(rank: int, folder: str, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result: Any = function(rank, *args)
    except BaseException:
        torch.save(traceback.format_exc(), os.path.join(folder, f"result{rank}"))
        raise
    torch.save(result, os.path.join(folder, f"result{rank}"))
    dist.barrier()
    dist.destroy_process_group()
