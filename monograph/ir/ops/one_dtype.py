"""Ops whose tensors must be of one dtype. Torch's kernels for fakes do not look at that: a capture has to."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import OpOverload, schema_of

_PRODUCTS: Final = frozenset(
    f"aten::{name}"
    for name in [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "convolution",
        "convolution_backward",
    ]
)
_NORMS: Final = frozenset(
    f"aten::{name}"
    for name in [
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "cudnn_batch_norm",
        "_native_batch_norm_legit_no_training",
    ]
)
_STATISTICS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what norms mix: x is a half


def refused_dtypes(node: fx.Node) -> tuple[torch.dtype, ...]:
    """The dtypes of what an op is given, in order, if no kernel takes them together; none if that is well."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return ()
    name = str(schema_of(target).name)
    if name not in _PRODUCTS and name not in _NORMS:
        return ()
    tensors = [item.meta.get("val") for item in node.all_input_nodes]
    found = tuple(dict.fromkeys(item.dtype for item in tensors if isinstance(item, torch.Tensor)))
    if len(found) < 2 or (name in _NORMS and _STATISTICS.issuperset(found)):
        return ()
    return found
