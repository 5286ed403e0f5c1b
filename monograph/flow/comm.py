"""Collectives in a world of one process: what others would add is nothing. DistributedError in one of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from monograph import DistributedError
from monograph.flow.sbp import check_alone


def barrier() -> None:
    """Wait for all processes."""
    check_alone()


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    check_alone()
    return tensor


def reduce(tensor: Tensor, dst: int = 0) -> Tensor:
    """The sum over all processes, in process `dst`."""
    _check_rank(dst)
    return tensor


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """The tensor of process `src`."""
    _check_rank(src)
    return tensor


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor) -> None:
    """Copy the tensor of each process into `tensor_list`."""
    _fill(tensor_list, [tensor])


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor) -> None:
    """Copy the tensors of all processes into one."""
    _fill([output_tensor], [input_tensor])


def gather(tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0) -> None:
    """Copy the tensor of each process into `gather_list` of process `dst`."""
    _check_rank(dst)
    _fill([tensor] if gather_list is None else gather_list, [tensor])


def scatter(tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0) -> None:
    """Copy this process's item of `scatter_list` of process `src` into `tensor`."""
    _check_rank(src)
    _fill([tensor], [tensor] if scatter_list is None else scatter_list)


def all_to_all(output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor]) -> None:
    """Give each process its item, and take from each."""
    _fill(output_tensor_list, input_tensor_list)


def reduce_scatter(output: Tensor, input_list: Sequence[Tensor]) -> None:
    """Copy the sum of this process's items into `output`."""
    _fill([output], input_list)


def reduce_scatter_tensor(output_tensor: Tensor, input_tensor: Tensor) -> None:
    """Copy this process's part of the sum into `output_tensor`."""
    _fill([output_tensor], [input_tensor])


def send(input: Tensor, dst: int, send_meta: bool = True) -> None:
    """Refused: there is nobody to send to."""
    raise _nobody(dst)


def recv(src: int, *args: Any, **kwargs: Any) -> Tensor:
    """Refused: there is nobody to receive from."""
    raise _nobody(src)


def _fill(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    check_alone()
    if len(outputs) != 1 or len(inputs) != 1:
        raise DistributedError(
            f"{len(inputs)} tensors go to {len(outputs)}, and there is one process", hint="give one of each"
        )
    if outputs[0] is not inputs[0]:
        outputs[0].copy_(inputs[0].reshape(outputs[0].shape))


def _check_rank(rank: int) -> None:
    check_alone()
    if rank != 0:
        raise _nobody(rank)


def _nobody(rank: int) -> DistributedError:
    return DistributedError(f"there is no process {rank}: there is one, of rank 0", hint="use rank 0")
