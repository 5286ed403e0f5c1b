"""Cells of recurrent layers whose sizes vary, by the ops that torch's functions call: C++ there asks for the numbers of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional as F

from monograph.capture.numbers.moving import is_moving

Weights = Sequence[torch.Tensor | None]  # of the input and of the state, and their biases


def _gru_cell(x: torch.Tensor, state: torch.Tensor, weights: Weights) -> torch.Tensor:
    of_x, of_state, *biases = weights
    first, second = biases or (None, None)
    given, kept = _parts(F.linear(x, of_x, first), 3), _parts(F.linear(state, of_state, second), 3)  # type: ignore[arg-type]
    reset = kept[0].add_(given[0]).sigmoid_()
    update = kept[1].add_(given[1]).sigmoid_()
    new = given[2].add(kept[2].mul_(reset)).tanh_()
    return (state - new).mul_(update).add_(new)


def _lstm_cell(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    (state, cell), (of_x, of_state, *biases) = states, weights
    first, second = biases or (None, None)
    gates = F.linear(state, of_state, second).add_(F.linear(x, of_x, first))  # type: ignore[arg-type]
    enter, keep, new, leave = _parts(gates, 4)
    enter, keep, new, leave = enter.sigmoid_(), keep.sigmoid_(), new.tanh_(), leave.sigmoid_()
    cell = (keep * cell).add_(enter * new)
    return leave * cell.tanh(), cell


def _parts(gates: torch.Tensor, count: int) -> Any:
    return torch.ops.aten.unsafe_split.Tensor(gates, gates.shape[1] // count, 1)


_CELLS: Final[Mapping[Any, tuple[Callable[..., Any], int]]] = {
    torch.gru_cell: (_gru_cell, 3),
    torch.lstm_cell: (_lstm_cell, 4),
}


def cell_by_ops(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A GRU or LSTM cell by its ops where a size varies; the function as it is on other devices, and for what it refuses."""
    run, gates = _CELLS[func]
    if kwargs or len(args) not in (4, 6):
        return func(*args, **kwargs)
    x, given, *weights = args
    states = given if func is torch.lstm_cell else [given]
    return run(x, given, weights) if _takes(x, states, weights, gates) else func(*args)


def _takes(x: torch.Tensor, states: Sequence[torch.Tensor], weights: Weights, gates: int) -> bool:
    """True for tensors of the shapes that a cell takes, on a CPU, where a size varies."""
    tensors = [x, *states, *(item for item in weights if item is not None)]
    if not any(is_moving(size) for item in tensors for size in item.shape):
        return False
    flat = (
        all(item.dim() == 2 and item.device.type == "cpu" for item in (x, *states))
        and len(states) == gates - 2
    )
    if not flat:
        return False
    hidden = states[0].shape[1]
    of_x, of_state = (tuple(item.shape) for item in tensors[1 + len(states) :][:2])
    return (
        of_x == (gates * hidden, x.shape[1])
        and of_state == (gates * hidden, hidden)
        and all(tuple(item.shape) == (x.shape[0], hidden) for item in states)
    )
