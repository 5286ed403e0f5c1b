"""Bytes that descriptions of values do not have: of results whose size only their kernel knows, of what is being sent."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import copied_by_gloo
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.distributed.programs.collectives import begins_collective
from monograph.ir.meta import TensorMeta, form

_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default
_WORKSPACE: Final = 3  # which of its results
_LONGEST: Final = 64  # steps that are tried; longer sequences take as much more for each step
_TRIED: Final = 256  # kinds of layers that are remembered


def result_bytes(node: fx.Node, index: int, described: TensorMeta) -> int:
    """The bytes of a result of an op, as its description says, or as its kernel does where that says nothing."""
    if node.target is not _RECURRENT or index != _WORKSPACE:
        return described.extent
    first = form(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if first is None or first.device.type != "cpu" or first.varies:
        return described.extent
    # torch puts steps first, also for a layer whose batch comes first
    return _recurrent_workspace(first.shape, first.dtype, tuple(node.args[9:14]), bool(node.args[15]))


@lru_cache(maxsize=_TRIED)
def _recurrent_workspace(
    shape: tuple[int, ...], dtype: torch.dtype, how: tuple[Any, ...], train: bool
) -> int:
    """The workspace of a layer over `steps, batch, features`, by a run of it on a sequence that is not long.

    `how` is its kind, hidden size, number of layers, and whether it has biases and both directions.
    """
    steps = shape[0]
    if steps <= _LONGEST:
        return _tried(steps, shape, dtype, how, train)
    whole, half = (_tried(count, shape, dtype, how, train) for count in (_LONGEST, _LONGEST // 2))
    return whole + (whole - half) * 2 * (steps - _LONGEST) // _LONGEST


def _tried(steps: int, shape: tuple[int, ...], dtype: torch.dtype, how: tuple[Any, ...], train: bool) -> int:
    mode, hidden, layers, has_biases, both = how
    gates = {2: 4, 3: 3}.get(mode, 1)
    given = torch.zeros(steps, *shape[1:], dtype=dtype, device="cpu")
    weights = [torch.zeros(gates * hidden, width, dtype=dtype, device="cpu") for width in (shape[-1], hidden)]
    biases = [torch.zeros(gates * hidden, dtype=dtype, device="cpu") for _ in range(2)]
    state = torch.zeros(layers, shape[1], hidden, dtype=dtype, device="cpu")
    try:
        with outside_of_modes(), outside_of_function_modes(), torch.enable_grad():
            made = _RECURRENT(
                given,
                *weights,
                *biases,
                state,
                state,
                False,
                [],
                mode,
                hidden,
                layers,
                has_biases,
                both,
                False,
                train,
            )
    except RuntimeError:  # a layer that this library does not take
        return 0
    return int(made[_WORKSPACE].untyped_storage().nbytes())


def sent_copy_bytes(node: fx.Node) -> int:
    """The bytes of the copy that a process group on processors holds of what a collective sends or makes, until that is waited for."""
    if not begins_collective(node):
        return 0
    made = form(node)
    if made is None or made.device.type != "cpu":
        return 0
    given = sum(item.extent for source in node.all_input_nodes if (item := form(source)) is not None)
    return copied_by_gloo(node.target, given, made.extent)
