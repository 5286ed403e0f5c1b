"""The loop of a recurrent layer and its gradients by ops of torch: what `native/recurrent.h` computes, in any type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monograph.layout import Layout
from monograph.native.recurrent import Recurrence

Tensor = torch.Tensor


def recurrence(given: Tensor, weight: Tensor, first: Tensor, other: Any, kind: str, reverse: bool) -> Tensor:
    """The states of all steps and what the backward needs, in one block."""
    state, cells = first, other
    made: list[list[Tensor]] = []
    for x in reversed(given.unbind()) if reverse else given.unbind():
        product = state @ weight.t()
        if kind == "lstm":
            i, f, g, o = (x + product).chunk(4, -1)
            gates = [i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()]
            cells = gates[1] * cells + gates[0] * gates[2]
            state = gates[3] * cells.tanh()
            made.append([state, cells, torch.cat(gates, -1)])
        elif kind == "gru":
            r, z, n = x.chunk(3, -1)
            of_r, of_z, of_n = (product + other).chunk(3, -1)
            reset, update = (r + of_r).sigmoid(), (z + of_z).sigmoid()
            fresh = (n + reset * of_n).tanh()
            state = (state - fresh) * update + fresh
            made.append([state, of_n, torch.cat([reset, update, fresh], -1)])
        else:
            state = (x + product).tanh() if kind == "tanh" else (x + product).relu()
            made.append([state])
    if reverse:
        made.reverse()
    return _block(torch.stack(parts) for parts in zip(*made, strict=True))


def recurrence_backward(
    grad: Tensor,
    last: Tensor,
    last_cells: Any,
    weight: Tensor,
    first: Any,
    block: Tensor,
    kind: str,
    reverse: bool,
) -> Tensor:
    """The gradients of what was given, of what states give to the gates of a GRU, and of first state and cells, in one block."""
    kept = _kept(block, grad, weight, kind)
    of_state, of_cells = last, last_cells
    steps = range(len(grad)) if reverse else range(len(grad) - 1, -1, -1)
    made: dict[int, list[Tensor]] = {}
    for t in steps:
        before = t + 1 if reverse else t - 1
        states, *inner, gates = (item[t] for item in kept)
        of_this = grad[t] + of_state
        if kind == "lstm":
            i, f, g, o = gates.chunk(4, -1)
            bent = inner[0].tanh()
            of_cells = of_cells + of_this * o * _tanh_slope(bent)
            old = kept[1][before] if 0 <= before < len(grad) else first
            slopes = [_slope(i), _slope(f), _tanh_slope(g), _slope(o)]
            ways = [of_cells * g, of_cells * old, of_cells * i, of_this * bent]
            of_sums = torch.cat([way * slope for way, slope in zip(ways, slopes, strict=True)], -1)
            of_cells = of_cells * f
            made[t] = [of_sums]
            of_state = of_sums @ weight
        elif kind == "gru":
            r, z, n = gates.chunk(3, -1)
            old = kept[0][before] if 0 <= before < len(grad) else first
            of_n = of_this * (1 - z) * _tanh_slope(n)
            both = [of_n * inner[0] * _slope(r), of_this * (old - n) * _slope(z)]
            made[t] = [torch.cat([*both, of_n], -1), torch.cat([*both, of_n * r], -1)]
            of_state = of_this * z + made[t][1] @ weight
        else:
            slope = _tanh_slope(states) if kind == "tanh" else (~(states <= 0)).to(states.dtype)
            made[t] = [of_this * slope]
            of_state = made[t][0] @ weight
    parts = zip(*(made[t] for t in range(len(grad))), strict=True)
    return _block([*map(torch.stack, parts), of_state, *([of_cells] if kind == "lstm" else [])])


def _kept(block: Tensor, grad: Tensor, weight: Tensor, kind: str) -> list[Tensor]:
    """What the forward gave, step by step; where it gave no gates, its states stand for them."""
    wide = (*grad.shape[:2], weight.shape[0])
    shape = [Layout.contiguous(*wide), *([Layout.contiguous(*weight.shape)] * 3)]
    parts = Recurrence.of(shape[: 4 if kind in ("lstm", "gru") else 3], [kind, False], 1).parts
    pieces = block.split([torch.Size(size).numel() for size in parts.values()])
    found = [piece.view(size) for piece, size in zip(pieces, parts.values(), strict=True)]
    return found if len(found) > 1 else found * 2


def _slope(y: Tensor) -> Tensor:
    return y * (1 - y)


def _tanh_slope(y: Tensor) -> Tensor:
    return 1 - y * y


def _block(parts: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
