"""Tensors that processes share: DTensors, by OneFlow's words as functions, methods and arguments of factories.

In a process without others a tensor is whole, and these move it to the device of the placement alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import monograph as mg
from monograph import DistributedError
from monograph.compat.distributed.tensors import is_sharded, whole_on_all
from monograph.flow.tensors.world import begin, size
from monograph.ir.call.tree import flatten, unflatten


class placement(mg.distributed.placement):  # OneFlow's name
    """Devices that hold a tensor: a type such as "cpu" or "cuda", and the ranks of their processes.

    Raises DistributedError for a rank that no process has.

    >>> placement("cpu", ranks=[0])
    placement(type="cpu", ranks=[0])
    """

    begin = staticmethod(begin)


def to_global(
    input: Any,
    placement: mg.distributed.placement | None = None,
    sbp: Any = None,
    *,
    grad_sbp: object = None,
    check_meta: bool = True,
    copy: bool = False,
) -> Any:
    """A tensor that the processes of a placement share, or a module of such; `monograph.distributed.to_global`.

    `grad_sbp` changes no numbers: gradients are laid out by torch.
    """
    begin()
    if not dist.is_initialized() and isinstance(input, (torch.Tensor, nn.Module)):
        found = input if placement is None else input.to(placement.type)
    else:
        found = mg.distributed.to_global(input, placement, sbp, check_meta=check_meta)
    return found.clone() if copy and found is input and isinstance(found, torch.Tensor) else found


def to_local(input: Any, *, copy: bool = False) -> Any:
    """What this process has of a tensor, or of those of a module: `monograph.distributed.to_local`."""
    found = mg.distributed.to_local(input) if dist.is_initialized() else input
    return found.clone() if copy else found


def on_all_ranks(item: Any) -> Any:
    """Containers with whole tensors in place of those that some processes alone share."""
    leaves: list[Any] = []
    form = flatten(item, leaves)
    made = [
        whole_on_all(leaf) if is_sharded(leaf) and leaf.device_mesh.size() < size() else leaf
        for leaf in leaves
    ]
    return unflatten(form, iter(made))


def _placement_of(tensor: torch.Tensor) -> placement:
    _check_shared(tensor, "placement")
    return placement.of(tensor.device_mesh)  # type: ignore[attr-defined]


def _sbp_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    _check_shared(tensor, "sbp")
    return mg.distributed.sbp_of(tensor)


def _check_shared(tensor: torch.Tensor, name: str) -> None:
    if not is_sharded(tensor):
        raise DistributedError(
            f"a tensor of this process alone has no {name}",
            hint="ask x.is_global first, or share it: x.to_global(placement, sbp)",
        )


def give_methods() -> None:
    """Let tensors and modules have OneFlow's methods. torch has none of these names, and nothing of torch's is replaced."""
    of_tensors: dict[str, Any] = {
        "to_global": to_global,
        "global_to_global": to_global,
        "local_to_global": to_global,
        "is_global": property(is_sharded, doc="True for a tensor that processes share."),
        "is_local": property(lambda self: not is_sharded(self), doc="True for a tensor of this process."),
        "placement": property(_placement_of, doc="The devices that share a tensor."),
        "sbp": property(_sbp_of, doc="How they share it."),
    }
    of_modules = {"to_global": to_global, "to_local": to_local}
    for owner, members in (
        (torch.Tensor, of_tensors | {"to_local": to_local}),  # a DTensor has its own
        (nn.Module, of_modules),
    ):
        for name, member in members.items():
            setattr(owner, name, member)


def _placed(name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def make(
        *args: Any, placement: mg.distributed.placement | None = None, sbp: Any = None, **options: Any
    ) -> Any:
        if placement is None:
            return plain(*args, **options)
        begin()
        requires_grad = options.pop("requires_grad", False)
        made = plain(*args, **{"device": placement.type, **options})
        if dist.is_initialized():
            made = mg.distributed.made_global(made, placement, sbp)
        return made.requires_grad_(requires_grad)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"`torch.{name}`; with `placement` and `sbp` of a tensor that processes share, that of the first."
    )
    return make


FACTORIES = {
    name: _placed(name)
    for name in (
        "arange",
        "empty",
        "eye",
        "full",
        "hann_window",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    )
}
