"""Recurrent layers that torch unrolls, GRU and RNN, as one op for each layer: compiled code makes loops of them, and their steps may vary.

The op gives what torch's function gives, and its backward what autograd gives for that, bit for bit. Only sums of gradients over several
uses of a weight are taken in another order than where each step is an op: `joins_gradients` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import fx
from torch.nn import functional as F

from monograph.capture.numbers.moving import is_moving
from monograph.compat.tensors import is_transformed
from monograph.ir.meta import origin
from monograph.ir.ops.unrolled import UNROLLED_LAYER, UNROLLED_LAYER_BACKWARD, unrolled

LAYERS: Final = {torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}
Weights = Sequence[torch.Tensor | None]  # of the input and of the state, and their biases
_LSTM = 2  # as oneDNN numbers kinds of layers
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[str, bool, list[bool]], *given: torch.Tensor) -> Any:
        ctx.save_for_backward(*given)
        ctx.how = how
        ctx.set_materialize_grads(False)
        x, first, *weights = given
        return UNROLLED_LAYER(x, first, weights, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, first, *weights = given = ctx.saved_tensors
        *kind, wanted = ctx.how
        if torch.is_grad_enabled():  # the gradient is differentiated itself
            made = unrolled(x, first, weights, *kind)
            pairs = [(item, grad) for item, grad in zip(made, grads, strict=True) if grad is not None]
            outputs, of_outputs = zip(*pairs, strict=True)
            asked = [item for item, is_wanted in zip(given, wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(outputs, asked, of_outputs, create_graph=True))
        else:
            found = iter(UNROLLED_LAYER_BACKWARD(*grads, x, first, weights, *ctx.how))
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)


_APPLY: Any = _Layer.apply


def call(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One of LAYERS: each layer as one op, with torch's ops between them; the function as it is where it is called otherwise."""
    if kwargs or not _is_plain(args):
        return func(*args, **kwargs)
    x, first, weights, has_biases, count, dropout, trains, both_ways, batch_first = args
    ways, last = 1 + both_ways, []
    for_each = ways * (4 if has_biases else 2)
    states = first.unbind(0)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(count):
        if layer and dropout and trains:
            x = F.dropout(x, dropout)
        begin = first if count == 1 else torch.stack(states[layer * ways : (layer + 1) * ways])
        given = (x, begin, *weights[layer * for_each : (layer + 1) * for_each])
        wanted = [item.requires_grad for item in given]  # without gradients, too: torch multiplies by that
        x, end = _APPLY((LAYERS[func], both_ways, wanted), *given)
        last.append(end)
    return x.transpose(0, 1) if batch_first else x, last[0] if count == 1 else torch.cat(last)


def sizes_vary(args: tuple[Any, ...]) -> bool:
    """True if one of LAYERS, or torch.lstm, is called with sizes that vary, for whose numbers their C++ asks."""
    return len(args) == 9 and isinstance(args[0], torch.Tensor) and any(map(is_moving, args[0].shape))


def lstm_by_layers(args: tuple[Any, ...]) -> Any:
    """torch.lstm of a whole batch of float32 on a CPU, by the ops that it calls: it asks sizes that vary for their number."""
    x, (first, cell), weights, has_biases, count, dropout, trains, both_ways, batch_first = args
    ways = 1 + both_ways
    for_each = 4 if has_biases else 2
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    first, cell = first.contiguous(), cell.contiguous()
    ends: list[Any] = []
    for layer in range(count):
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            given = list(weights[at * for_each : (at + 1) * for_each])
            given += [torch.zeros_like(given[0]), torch.zeros_like(given[1])] if not has_biases else []
            how: Any = (
                bool(way),
                [],
                _LSTM,
                first.size(2),
                count,
                has_biases,
                both_ways,
                batch_first,
                trains,
            )
            made = torch.ops.aten.mkldnn_rnn_layer.default(x, *given, first[at], cell[at], *how)
            outputs.append(made[0])
            ends.append(made[1:3])
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and trains and layer < count - 1:
            x = torch.dropout(x, dropout, True)
    last, cells = (torch.stack(items, 0) for items in zip(*ends, strict=True))
    return x.transpose(0, 1) if batch_first else x, last, cells


def is_plain_lstm(args: tuple[Any, ...]) -> bool:
    """True for torch.lstm of a whole batch of float32 on a CPU, with sizes that vary."""
    if not sizes_vary(args) or len(args[1]) != 2:
        return False
    if not torch.backends.mkldnn.enabled or bool(args[1][0].shape[-1] != args[1][1].shape[-1]):
        return False  # other kernels, or projections
    return all(_is_plain((args[0], first, *args[2:])) for first in args[1])


def _is_plain(args: tuple[Any, ...]) -> bool:
    """True for a whole batch of float32 on a CPU."""
    if len(args) != 9 or not isinstance(args[2], (list, tuple)) or torch.is_autocast_enabled("cpu"):
        return False
    x, first, weights, *_ = args
    tensors = (x, first, *weights)
    plain = all(
        isinstance(item, torch.Tensor)
        and item.dtype is torch.float32
        and item.device.type == "cpu"
        and 0 not in item.shape
        and not is_transformed(item)
        for item in tensors
    )
    return plain and x.dim() == first.dim() == 3


def joins_gradients(graph: fx.Graph) -> bool:
    """True if autograd has added the gradient of a weight or first state of such a layer, or of an input of both ways, to another."""
    return any(
        _is_sum(user)
        for node in graph.find_nodes(op="call_function", target=UNROLLED_LAYER_BACKWARD)
        for item in node.users
        if item.target is getitem and not _is_input_of_one_way(node, item)
        for user in item.users
    )


def _is_input_of_one_way(node: fx.Node, item: fx.Node) -> bool:
    """torch adds the gradients of both ways to what is there already one by one."""
    both_ways, wanted = node.args[6:8]
    assert isinstance(wanted, (list, tuple))
    return bool(item.args[1] == 0 and wanted[0] and not both_ways)


def _is_sum(node: fx.Node) -> bool:
    """True for a sum that autograd has made of two results of the step; an optimizer adds later."""
    within = all(isinstance(item, fx.Node) and item.op != "placeholder" for item in node.args[:2])
    return node.target in _ADDS and within and origin(node).phase == "backward"


# --- cells -----------------------------------------------------------------------------------------------------------


def _gru_cell(x: torch.Tensor, state: torch.Tensor, weights: Weights) -> torch.Tensor:
    of_x, of_state, *biases = weights
    first, second = biases or (None, None)
    given, kept = _parts(F.linear(x, of_x, first), 3), _parts(F.linear(state, of_state, second), 3)  # type: ignore[arg-type]
    reset = kept[0].add_(given[0]).sigmoid_()
    update = kept[1].add_(given[1]).sigmoid_()
    new = given[2].add(kept[2].mul_(reset)).tanh_()
    left: torch.Tensor = state - new
    return left.mul_(update).add_(new)


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
    """A GRU or LSTM cell by the ops that torch's function calls, which asks sizes that vary for their numbers.

    The function as it is for sizes that do not vary, on other devices, and for what it refuses.
    """
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
