"""Sparse tensors of state: their parts, the fakes made of these, and what must stay of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from monograph.compat.fakes import is_fake, make_sparse_fake
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.errors import CaptureError
from monograph.ir.call.sparse import HELD, SparseForm, count_of, form_of, is_sparse, know_parts, parts_of
from monograph.ir.call_text import leaves
from monograph.user_code.lines import user_place

_PARTS: Any = WeakTensorKeyDictionary()  # of sparse tensors of state: each part is one object, as state is


def known_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors of a sparse one: the same objects at each call, while they are on the same memory."""
    with outside_of_modes(), outside_of_function_modes():
        now = parts_of(tensor)
        known: tuple[torch.Tensor, ...] | None = _PARTS.get(tensor)
        if known is None or _places(known) != _places(now):
            known = _PARTS[tensor] = now
    return known


def _places(parts: Sequence[torch.Tensor]) -> list[Any]:
    return [(part.data_ptr(), part.shape, part.stride(), part.dtype, part.device) for part in parts]


def sparse_layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What must stay of a sparse tensor of state: its form, and where its parts are."""
    parts = parts_of(tensor)
    return form_of(tensor), count_of(form_of(tensor), parts), _places(parts)


def fake_of(mode: Any, form: SparseForm, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The fake of a sparse tensor with these fakes as its parts."""
    if form.layout not in HELD:
        raise CaptureError(
            f"build() makes a {form} tensor",
            where=user_place(),
            hint="graphs work on sparse tensors of the layouts COO, CSR and CSC",
        )
    made = make_sparse_fake(mode, form, parts)
    know_parts(made, form, parts)
    return made


def note_histories(returned: Any) -> None:
    """Let the values of sparse tensors that build() returns say that they require grad, where there is a way to them."""
    for _, tensor in leaves(returned, ""):
        if is_sparse(tensor) and is_fake(tensor) and tensor.requires_grad and form_of(tensor).coalesced:
            know_parts(tensor, form_of(tensor), (*parts_of(tensor)[:-1], tensor.values()))
