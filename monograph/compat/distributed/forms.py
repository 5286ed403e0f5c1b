"""DTensors among arguments and results: a program holds what this process has of one; the rest is in the form of the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from monograph.compat.distributed.tensors import awaited_part, from_spec, layout_of, spec_of, with_shape


class ShardForm(NamedTuple):
    """What a DTensor is besides the part that this process has. Of a result: whether autograd knows it."""

    spec: Any  # torch's, with the mesh, the placements, and the whole shape
    requires_grad: bool
    part: tuple[int, ...]  # the shape of what this process has

    def __str__(self) -> str:
        return f"a DTensor {layout_of(self.spec)}"


def shard_form(item: Any) -> ShardForm:
    """What a DTensor is besides its part."""
    return ShardForm(spec_of(item), item.requires_grad, tuple(awaited_part(item).shape))


def shard_of(form: ShardForm, parts: Sequence[torch.Tensor]) -> Any:
    """The DTensor of a part. One of a micro-batch has fewer rows, and so has the whole; joined ones have more."""
    (local,) = parts
    spec, shape = form.spec, tuple(form.spec.shape)
    if not form.part and local.dim() == 1:
        spec = with_shape(spec, (local.shape[0],))
    elif form.part and form.part[0] not in (0, local.shape[0]):
        spec = with_shape(spec, (shape[0] * local.shape[0] // form.part[0], *shape[1:]))
    return from_spec(spec, local)


def rows_apart(form: ShardForm) -> int:
    """Over how many processes the rows of a DTensor are spread."""
    places = zip(form.spec.mesh.shape, form.spec.placements, strict=True)
    return math.prod(size for size, place in places if place.is_shard(0))
