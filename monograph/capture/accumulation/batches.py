"""One call is a mini-batch; what build() sees is a micro-batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from monograph.compat.distributed.forms import ShardForm, rows_apart
from monograph.errors import AliasError, SignatureError
from monograph.ir.call.signature import Call, Spec, TensorKey
from monograph.ir.call.sparse import SparseForm
from monograph.ir.call.tree import tensor_forms
from monograph.ir.text import count_text


def micro_call(call: Call, steps: int, index: int = 0) -> Call:
    """The call with one of `steps` equal parts of each batch along dimension 0; replicated arguments stay whole."""
    paths = call.paths()
    _check_forms(call, steps)
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


def _check_forms(call: Call, steps: int) -> None:
    """Raise SignatureError for a sparse argument that would be split, and for a DTensor whose parts would be uneven."""
    for position, (form, path) in enumerate(zip(tensor_forms(call.tree), call.paths(), strict=True)):
        whole = path.rpartition(".")[0]
        if position in call.replicated:
            continue
        if isinstance(form, ShardForm) and form.part and form.spec.shape[0] % (steps * rows_apart(form)):
            raise SignatureError(
                f"argument {whole} has {form.spec.shape[0]} rows on {rows_apart(form)} processes: they cannot be split into "
                f"{steps} equal micro-batches",
                hint="pass a batch whose size is a multiple of both, or mg.replicated(...) if it is no batch",
            )
        if isinstance(form, SparseForm):
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
        what = f"has {count_text(leaf.shape[0], 'row')}" if leaf.shape else "has no dimension"
        raise SignatureError(
            f"argument {path} {what}: it cannot be split into {steps} equal micro-batches",
            hint="pass the whole batch, of which each micro-batch is a part: a multiple of set_gradient_accumulation_steps() rows; "
            "DataLoader(..., drop_last=True) leaves out a smaller last one; or accumulate by hand, a call for each micro-batch, "
            f"with an argument that says if it updates; mg.replicated({path}) if it is no batch",
        )


def _part(leaf: Any, steps: int, index: int) -> Any:
    size = leaf.shape[0] // steps
    if isinstance(leaf, Spec):
        return Spec((size, *leaf.shape[1:]), leaf.dtype, leaf.device)
    part = leaf.detach().narrow(0, index * size, size)
    return part.requires_grad_(leaf.requires_grad) if leaf.requires_grad else part
