"""A process group that counts what is sent: gloo does the work, each collective is noted where torch hands it over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

Sent = tuple[str, int]  # a collective, and the bytes of the whole of what it is about

_LOG: list[Sent] = []


@contextmanager
def counted() -> Iterator[list[Sent]]:
    """Inside, the collectives of this process are noted in the list."""
    _LOG.clear()
    found: list[Sent] = []
    yield found
    found += _LOG


def payload(sent: Sequence[Sent], size: int) -> int:
    """The bytes that a process sends around a ring of so many: twice for a sum, once for all else."""
    times = {
        "all_reduce": 2 * (size - 1),
        "all_gather": size - 1,
        "reduce_scatter": size - 1,
        "broadcast": size - 1,
    }
    return sum(-(-times[name] * nbytes // size) for name, nbytes in sent)


class _Counting(dist.ProcessGroup):
    def __init__(self, inner: Any, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner, self._store, self._number = inner, store, (rank, size)

    def size(self) -> int:
        return self._number[1]

    def rank(self) -> int:
        return self._number[0]

    def getBackendName(self) -> str:  # the name that torch asks for
        return "counting"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def get_group_store(self) -> Any:
        return self._store

    def _note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        _LOG.append((name, sum(tensor.nbytes for tensor in tensors)))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._note("all_reduce", tensors)
        return self._inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self._note("broadcast", tensors)
        return self._inner.broadcast(tensors, opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._note("all_gather", [tensor for row in outputs for tensor in row])
        return self._inner.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        self._note("all_gather", [output])
        return self._inner._allgather_base(output, given, opts or dist.AllgatherOptions())

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._note("all_gather", outputs)
        return self._inner.allgather_into_tensor_coalesced(outputs, inputs, opts or dist.AllgatherOptions())

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        self._note("reduce_scatter", [given])
        return self._inner._reduce_scatter_base(output, given, opts or dist.ReduceScatterOptions())

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._note("reduce_scatter", inputs)
        return self._inner.reduce_scatter_tensor_coalesced(
            outputs, inputs, opts or dist.ReduceScatterOptions()
        )

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        self._note("send", tensors)
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._inner.recv(tensors, source, tag)

    # what torch calls them from 2.13 on
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def count_from_now_on() -> None:
    """Let this process, one of a gloo group, have a group that counts instead of it."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()

    def made(given: Any, of_rank: int, of_size: int, timeout: timedelta) -> Any:
        inner: Any = dist.ProcessGroup(given, of_rank, of_size)
        kind: Any = dist.ProcessGroup.BackendType.GLOO
        gloo: Any = ProcessGroupGloo(given, of_rank, of_size, timeout)
        inner._set_default_backend(kind)
        inner._register_backend(torch.device("cpu"), kind, gloo)
        return _Counting(inner, given, of_rank, of_size)

    dist.Backend.register_backend("counting", made, devices=["cpu"])
    dist.init_process_group("counting", store=dist.PrefixStore("counting", store), rank=rank, world_size=size)
