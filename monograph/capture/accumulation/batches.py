"""One call is a mini-batch; what build() sees is a micro-batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from monograph.errors import AliasError, SignatureError
from monograph.ir.call.signature import Call, Spec, TensorKey
from monograph.ir.call.tree import sparse_leaves


def micro_call(call: Call, steps: int, index: int = 0) -> Call:
    """The call with one of `steps` equal parts of each batch along dimension 0; replicated arguments stay whole."""
    paths = call.paths()
    check_no_sparse(call)
    parts: dict[int, Any] = {}  # by id of the leaf: a tensor passed twice is one batch
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, (torch.Tensor, Spec)) and position not in call.replicated:
            _check_divisible(leaf, paths[position], steps)
            parts.setdefault(id(leaf), _part(leaf, steps, index))
    leaves = [
        leaf if position in call.replicated else parts.get(id(leaf), leaf)
        for position, leaf in enumerate(call.leaves)
    ]
    keys = [
        key._replace(shape=(key.shape[0] // steps, *key.shape[1:]))
        if isinstance(key, TensorKey) and id(leaf) in parts and position not in call.replicated
        else key
        for position, (leaf, key) in enumerate(zip(call.leaves, call.keys, strict=True))
    ]
    return call._replace(leaves=tuple(leaves), keys=tuple(keys))


def check_no_state(call: Call, state: Collection[int]) -> None:
    """Raise AliasError for an argument to be split that is state of the graph; `state` are ids of tensors."""
    for position, (leaf, path) in enumerate(zip(call.leaves, call.paths(), strict=True)):
        if id(leaf) in state and position not in call.replicated:
            raise AliasError(
                f"argument {path} is a parameter or buffer of the graph, and would be split into micro-batches",
                hint=f"pass mg.replicated({path}), or leave it out: build() can read it from its module",
            )


def check_no_sparse(call: Call) -> None:
    """Raise SignatureError for a sparse argument that would be split: its parts are no batches."""
    for position, (part, path) in enumerate(zip(sparse_leaves(call.tree), call.paths(), strict=True)):
        if part and position not in call.replicated:
            whole = path.rpartition(".")[0]
            raise SignatureError(
                f"argument {whole} is a sparse tensor, which cannot be split into micro-batches",
                hint=f"pass mg.replicated({whole}): each micro-batch gets it whole",
            )


def batch_paths(call: Call) -> set[str]:
    """The paths of the arguments that are split."""
    return {
        path
        for position, (leaf, path) in enumerate(zip(call.leaves, call.paths(), strict=True))
        if isinstance(leaf, (torch.Tensor, Spec)) and position not in call.replicated
    }


def _check_divisible(leaf: Any, path: str, steps: int) -> None:
    if not leaf.shape or leaf.shape[0] % steps:
        what = f"has {leaf.shape[0]} rows" if leaf.shape else "has no dimension"
        raise SignatureError(
            f"argument {path} {what}: it cannot be split into {steps} equal micro-batches",
            hint="pass a batch whose size is a multiple of set_gradient_accumulation_steps(), "
            f"or mg.replicated({path}) if it is no batch",
        )


def _part(leaf: Any, steps: int, index: int) -> Any:
    size = leaf.shape[0] // steps
    if isinstance(leaf, Spec):
        return Spec((size, *leaf.shape[1:]), leaf.dtype, leaf.device)
    part = leaf.detach().narrow(0, index * size, size)
    return part.requires_grad_(leaf.requires_grad) if leaf.requires_grad else part
