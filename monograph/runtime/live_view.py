"""A result of a step that is a view of state or of an argument: made anew at each call, on the memory of then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.compat.tensors import negated_by_bit
from monograph.ir.graph_signature import Copy, LiveView


def live_view(live: LiveView, leaves: Sequence[Any]) -> torch.Tensor:
    """The view, for a call with these leaves."""
    whole = live.target.tensor if isinstance(live.target, Copy) else leaves[live.target.index]
    with hidden_from_dispatch_modes():
        whole = whole.detach()
        if live.dtype is not None:
            begin = whole.storage_offset() * whole.element_size() // live.dtype.itemsize
            view = torch.empty(0, dtype=live.dtype, device=whole.device)
            view = view.set_(whole.untyped_storage(), begin + live.distance, live.size, live.stride)
        else:
            view = whole.as_strided(live.size, live.stride, whole.storage_offset() + live.distance)
        view = view.conj() if live.conjugated else view
        return negated_by_bit(view) if live.negated else view
