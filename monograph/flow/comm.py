"""Collectives on tensors of each process: those of torch.distributed. In one process what others would add is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monograph import DistributedError
from monograph.flow.tensors.world import begin, size


def barrier() -> None:
    """Wait for all processes."""
    if size() > 1:
        dist.barrier()


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def reduce(tensor: Tensor, dst: int = 0) -> Tensor:
    """The sum over all processes, in place in process `dst`; the others keep theirs."""
    if _is_known(dst) and size() > 1:
        into = tensor if dist.get_rank() == dst else tensor.clone()
        dist.reduce(into, dst)
    return tensor


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """The tensor of process `src`, in place."""
    if _is_known(src) and size() > 1:
        dist.broadcast(tensor, src)
    return tensor


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor) -> None:
    """Copy the tensor of each process into `tensor_list`."""
    if _fits(tensor_list):
        dist.all_gather([*tensor_list], tensor)
    else:
        _copy(tensor, tensor_list[0])


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor) -> None:
    """Copy the tensors of all processes into one."""
    if size() > 1:
        dist.all_gather_into_tensor(output_tensor, input_tensor)
    else:
        _copy(input_tensor, output_tensor)


def gather(tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0) -> None:
    """Copy the tensor of each process into `gather_list` of process `dst`."""
    if _is_known(dst) and (size() > 1 if gather_list is None else _fits(gather_list)):
        dist.gather(tensor, None if gather_list is None else [*gather_list], dst)
    elif gather_list is not None:
        _copy(tensor, gather_list[0])


def scatter(tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0) -> None:
    """Copy this process's item of `scatter_list` of process `src` into `tensor`."""
    if _is_known(src) and (size() > 1 if scatter_list is None else _fits(scatter_list)):
        dist.scatter(tensor, None if scatter_list is None else [*scatter_list], src)
    elif scatter_list is not None:
        _copy(scatter_list[0], tensor)


def all_to_all(output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor]) -> None:
    """Give each process its item, and take from each."""
    if _fits(output_tensor_list) and _fits(input_tensor_list):
        requests = []
        for other, (theirs, ours) in enumerate(zip(output_tensor_list, input_tensor_list, strict=True)):
            if other == dist.get_rank():
                _copy(ours, theirs)
            else:
                requests += [dist.isend(ours.contiguous(), other), dist.irecv(theirs, other)]
        for request in requests:
            request.wait()  # type: ignore[union-attr]
    else:
        _copy(input_tensor_list[0], output_tensor_list[0])


def reduce_scatter(output: Tensor, input_list: Sequence[Tensor]) -> None:
    """Copy the sum of this process's items into `output`."""
    if _fits(input_list):
        dist.reduce_scatter(output, [*input_list])
    else:
        _copy(input_list[0], output)


def reduce_scatter_tensor(output_tensor: Tensor, input_tensor: Tensor) -> None:
    """Copy this process's part of the sum into `output_tensor`."""
    if size() > 1:
        dist.reduce_scatter_tensor(output_tensor, input_tensor)
    else:
        _copy(input_tensor, output_tensor)


def send(input: Tensor, dst: int, send_meta: bool = True) -> None:
    """Send a tensor to process `dst`; with `send_meta` its shape, type and device first."""
    _check_other(dst)
    if send_meta:
        dist.send_object_list([(tuple(input.shape), input.dtype, input.device.type)], dst)
    dist.send(input.contiguous(), dst)


def recv(
    src: int,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor from process `src`, in `out` if that is given. With `shape`, `dtype` and `device` nothing about it is sent."""
    _check_other(src)
    if shape is None or dtype is None or device is None:
        said: list[Any] = [None]
        dist.recv_object_list(said, src)
        shape, dtype, device = said[0]
    into = torch.empty(tuple(shape), dtype=dtype, device=device) if out is None else out
    dist.recv(into, src)
    return into


def _copy(source: Tensor, into: Tensor) -> None:
    if into is not source:
        into.copy_(source.reshape(into.shape))


def _fits(tensors: Sequence[Tensor]) -> bool:
    """True if there are others. Raises DistributedError if not one tensor for each process is there."""
    if len(tensors) != size():
        raise DistributedError(
            f"{len(tensors)} tensors for {size()} process{'es' if size() > 1 else ''}",
            hint="give one for each",
        )
    return size() > 1


def _is_known(rank: int) -> bool:
    """True. Raises DistributedError for a rank that no process has."""
    if not 0 <= rank < size():
        raise DistributedError(f"there is no process {rank} among {size()}", hint=f"use ranks below {size()}")
    return True


def _check_other(rank: int) -> None:
    begin()
    if _is_known(rank) and size() == 1:
        raise DistributedError(
            "there is one process, and nobody to send to or receive from", hint="start more with torchrun"
        )
