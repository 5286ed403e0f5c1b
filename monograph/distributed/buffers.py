"""Buffers that are those of the first process of a group whenever a module runs, as DistributedDataParallel has it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
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

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_T = TypeVar("_T")


def take_over(buffers: Iterable[torch.Tensor], group: str) -> None:
    """Give buffers the values that they have in the first process: one collective for those of one device."""
    kinds: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            kinds.setdefault(buffer.device, []).append(_plain(buffer))
    with torch.no_grad():
        for alike in kinds.values():
            rows = [(item.reshape(-1), item.dtype, item.numel()) for item in alike]
            for item, first in zip(alike, of_the_first(rows, group, _run), strict=True):
                with keeps_version(item):
                    item.copy_(first.view(item.shape))


def of_the_first(
    given: Sequence[tuple[_T, torch.dtype, int]], group: str, call: Callable[..., _T]
) -> list[_T]:
    """The numbers that the first process has, for each in a row like the given one. `call(op, *arguments)` runs or writes an op.

    Given are rows on one device, each with its type and how many numbers it has. Several types are sent as bytes.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for index, (_, dtype, _count) in enumerate(given):
        by_type.setdefault(dtype, []).append(index)
    # by size, so that in a row of bytes each begins where its type may
    types = sorted(by_type.items(), key=lambda item: -item[0].itemsize)
    sent = [call(_aten.cat.default, [given[index][0] for index in indices]) for _, indices in types]
    if len(types) > 1:
        sent = [call(_aten.cat.default, [call(_aten.view.dtype, row, torch.uint8) for row in sent])]
    first = call(_c10d.wait_tensor.default, call(_c10d.broadcast.default, *sent, 0, group))
    found, place = dict[int, _T](), 0
    for dtype, indices in types:
        row, begin = first, 0
        if len(types) > 1:
            end = place + dtype.itemsize * sum(given[index][2] for index in indices)
            row = call(_aten.view.dtype, call(_aten.slice.Tensor, first, 0, place, end), dtype)
            place = end
        for index in indices:
            end = begin + given[index][2]
            found[index], begin = call(_aten.slice.Tensor, row, 0, begin, end), end
    return [found[index] for index in range(len(given))]


def _run(op: Any, *args: Any) -> torch.Tensor:
    made: torch.Tensor = op(*args)
    return made


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
