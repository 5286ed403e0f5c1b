"""Buffers that are those of the first process of a group whenever a module runs, as DistributedDataParallel has it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monograph.compat.autograd import keeps_version
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.patching import replace_here
from monograph.distributed.averages import AveragedGradients, Doing, unnoticed
from monograph.distributed.replicas import Replica
from monograph.errors import DistributedError
from monograph.ir.call.tree import flatten, unflatten

_c10d: Any = torch.ops._c10d_functional


def take_over(buffers: Iterable[torch.Tensor], group: str) -> None:
    """Give buffers the values that they have in the first process: one collective for those of one device."""
    kinds: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = {}
    for buffer in buffers:
        if buffer.numel():
            plain = _plain(buffer)
            kinds.setdefault(plain.device, {}).setdefault(plain.dtype, []).append(plain)
    with torch.no_grad():
        for by_type in kinds.values():
            # by size, so that in a row of bytes each begins where its type may
            types = sorted(by_type.values(), key=lambda alike: -alike[0].itemsize)
            for alike, first in zip(types, _of_the_first(types, group), strict=True):
                begin = 0
                for item in alike:
                    with keeps_version(item):
                        item.copy_(first[begin : begin + item.numel()].view(item.shape))
                    begin += item.numel()


def _of_the_first(types: Sequence[Sequence[torch.Tensor]], group: str) -> list[torch.Tensor]:
    """For each list of tensors of one type their numbers in the first process, in a row. Several types are sent as bytes."""
    if len(types) == 1:
        return [_c10d.wait_tensor(_c10d.broadcast(_row(types[0]), 0, group))]
    sent = torch.cat([_row(alike).view(torch.uint8) for alike in types])
    first = _c10d.wait_tensor(_c10d.broadcast(sent, 0, group))
    ends = accumulate(sum(item.nbytes for item in alike) for alike in types)
    places = pairwise((0, *ends))
    return [first[begin:end].view(alike[0].dtype) for (begin, end), alike in zip(places, types, strict=True)]


def _row(alike: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([item.reshape(-1) for item in alike])


def take_over_buffers(
    replicas: Iterable[Replica],
    seen: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer,
    doing: Doing = unnoticed,
) -> None:
    """A step begins: buffers of modules without a wrapper, as this thread has `seen` them, are those of the first process."""
    for replica in replicas:
        if replica.wrapper is None and replica.size > 1:
            with doing("forward", replica.path):
                take_over([seen(buffer) for _, buffer in replica.buffers()], replica.group)


@contextmanager
def summed_later(replicas: Iterable[Replica], *, later: bool) -> Iterator[None]:
    """Inside, with `later`, wrappers only add to gradients."""
    with ExitStack() as stack:
        for replica in replicas if later else ():
            if replica.wrapper is not None:
                stack.enter_context(replica.wrapper.no_sync())
        yield


def begin_alike(replicas: Iterable[Replica], known: WeakSet[nn.Module]) -> None:
    """Let modules without a wrapper begin with the parameters and buffers of the first process. `known` ones have done so."""
    for replica in replicas:
        if replica.module not in known:
            state = [*replica.module.parameters(), *replica.module.buffers()]
            if replica.size > 1 and replica.wrapper is None:
                alike = [item.detach() for item in state if not (item.is_meta or is_sharded(item))]
                take_over(alike, replica.group)
            known.add(replica.module)


def _plain(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that every library of collectives knows."""
    if buffer.dtype is torch.bool:
        return buffer.view(torch.uint8)
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def bypass_wrappers(
    stack: ExitStack, replicas: Iterable[Replica], averaged: AveragedGradients, *, syncs: bool
) -> None:
    """Until the stack ends, in this thread, wrappers call what they wrap, and their hooks are not needed.

    Buffers are taken over before with `syncs`, else once by the step of micro-batches.
    """
    known = {id(replica.wrapper): replica for replica in replicas if replica.wrapper is not None}
    if not known:
        return
    its_own: Any = DistributedDataParallel.forward

    def forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if (replica := known.get(id(wrapper))) is None:
            return its_own(wrapper, *args, **kwargs)
        if not syncs:
            _check_runs_once(replica, averaged.ran)
        averaged.begin_forward(replica)
        if syncs and replica.syncs_buffers:
            take_over([buffer for _, buffer in replica.buffers()], replica.group)
        if wrapper.device_ids:
            args, kwargs = _on(torch.device(wrapper.device_type, wrapper.device_ids[0]), args, kwargs)
        result = wrapper.module(*args, **kwargs)
        wrapper.require_forward_param_sync = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
        return result

    replace_here(stack, DistributedDataParallel, "forward", forward)


def _check_runs_once(replica: Replica, ran: Container[str]) -> None:
    if replica.path in ran and replica.may_sync_buffers:
        raise DistributedError(
            f"build() runs {replica.path} twice in a micro-batch: in the last one eager mode takes its buffers over from "
            "the first process between the two",
            hint="wrap it with broadcast_buffers=False, or run it once on both inputs: torch.cat()",
        )


def _on(device: torch.device, args: Any, kwargs: Any) -> Any:
    leaves: list[Any] = []
    tree = flatten((args, kwargs), leaves)
    return unflatten(
        tree, iter([item.to(device) if isinstance(item, torch.Tensor) else item for item in leaves])
    )
