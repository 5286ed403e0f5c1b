"""The sparse gradient of the table of an `nn.EmbeddingBag`: the op that makes it is the one that PyTorch does not split up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch

from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.readings import UNKNOWN, Readings
from monograph.capture.tensors.sparse_parts import fake_of
from monograph.compat.ops import schema_of
from monograph.errors import DataDependentError
from monograph.ir.call.sparse import ON_SPARSE, Given, SparseForm, written
from monograph.user_code.lines import user_place

BAG_GRADIENT: Final = torch.ops.aten._embedding_bag_backward.default


def bag_gradient(readings: Readings, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The gradient, a row for each index, by `run`, which records an op; UNKNOWN for a dense one.

    Raises DataDependentError for a bag with padding, whose rows must be counted.
    """
    named = dict(zip((item.name for item in schema_of(BAG_GRADIENT).arguments), args, strict=False))
    if not named["sparse"]:
        return UNKNOWN
    if named.get("padding_idx", -1) >= 0:
        raise DataDependentError(
            "how many rows of nn.EmbeddingBag get a gradient depends on how many indices are padding_idx",
            where=user_place(),
            hint="make it with sparse=False, or without padding_idx",
        )
    parts: list[torch.Tensor] = []
    call = {
        "op": "_embedding_bag_backward.default",
        "args": [written(item, parts, [], is_moving) for item in args],
        "kwargs": {},
    }
    count, width, gradient = len(named["indices"]), named["grad"].shape[1], named["grad"]
    form = SparseForm(torch.sparse_coo, (named["num_weights"], width), coalesced=count < 2)
    gives = (
        Given((1, count), (max(count, 1), 1), torch.int64, gradient.device),
        Given((count, width), (max(width, 1), 1), gradient.dtype, gradient.device),
    )
    text = json.dumps([item.text() for item in gives])
    return fake_of(readings.inputs.mode, form, run(ON_SPARSE, (json.dumps(call), parts, None, text), {}))
