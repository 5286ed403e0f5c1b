"""How long ops take here: each kind of op is timed once on a machine, and remembered on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.modes import outside_of_modes
from monograph.compat.ops import is_random
from monograph.ir.evaluate import example
from monograph.ir.memory import is_view
from monograph.ir.meta import TensorMeta, frozen, metas, value
from monograph.ir.ops.arithmetic import flops
from monograph.ir.printer import spell_target
from monograph.kernels.tuned import remembered
from monograph.plan.updates.failing import can_fail

_RUNS: Final = 3, 12  # at least, and at most as long as they take
_ENOUGH: Final = 0.03  # seconds
_CALL: Final = 2e-6  # seconds that any op takes
_MOST_BYTES: Final = 1 << 28  # of tensors that are made for timing
_SECONDS, _PER_BYTE = "seconds", "seconds per byte"
_SIDE: Final = 512  # of the matrices, and 16 MiB of memory, by which ops that cannot run are predicted
_COPIED: Final = 1 << 24
# They take what another op has left in a workspace, and look at none of it.
_OF_WORKSPACES: Final = (
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default,
)


def seconds_of(nodes: Iterable[fx.Node]) -> list[float]:
    """The predicted time of each op.

    An op is timed on random data of its own sizes, or of sizes near them, unless it was timed on this machine before. What
    cannot be run is predicted by its arithmetic and the bytes it moves: on the device `meta`, above 256 MiB, and where an op may
    not take any values.
    """
    return [_CALL if is_view(node) else _CALL + _predicted(node) for node in nodes]


def _predicted(node: fx.Node) -> float:
    given, made = [*_tensors(node.all_input_nodes)], [*_tensors((node,))]
    if not made:
        return 0.0
    nbytes = max(sum(item.nbytes for item in (*given, *made)), 1)
    device = made[0].device
    count = flops(node)
    if device.type == "meta" or nbytes > _MOST_BYTES or can_fail(node) or _needs_the_step(node):
        return count * _per_flop(made[0].dtype) + nbytes * _per_byte()
    if count:
        kind = repr(frozen([node.args, dict(node.kwargs)], lambda item: str(value(item))))
        found = remembered(
            (spell_target(node.target), kind, str(device)), (_SECONDS,), lambda: _timed(node, 1)
        )
        per, times = found.seconds.get(_SECONDS), 1
    else:
        form = [(str(item.dtype), len(item.shape)) for item in (*given, *made)]
        sizes = str(math.frexp(nbytes)[1])  # powers of two
        facts = (spell_target(node.target), repr(form), sizes, str(device))
        found = remembered(facts, (_PER_BYTE,), lambda: _timed(node, nbytes))
        per, times = found.seconds.get(_PER_BYTE), nbytes
    return count * _per_flop(made[0].dtype) + nbytes * _per_byte() if per is None else per * times


def _needs_the_step(node: fx.Node) -> bool:
    """True for what cannot be timed here: other processes take part, it draws the step's numbers, or it needs the step's workspaces."""
    return communicates(node.target) or is_random(node.target) or node.target in _OF_WORKSPACES


def _tensors(nodes: Iterable[fx.Node]) -> Iterable[TensorMeta]:
    return (item for node in nodes for item in metas(value(node)))


def _timed(node: fx.Node, share: int) -> Mapping[str, float]:
    """The seconds of a run divided by `share`; nothing for an op that cannot be run on random data."""
    seeds = iter(range(len(node.all_input_nodes) + 1_000))

    def given(item: Any) -> Any:
        return (
            example(value(item), lambda meta: _random(meta, next(seeds)))
            if isinstance(item, fx.Node)
            else item
        )

    name = _SECONDS if share == 1 else _PER_BYTE
    try:
        with outside_of_modes(), torch.no_grad():
            args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), given)
            return {name: _least(lambda: node.target(*args, **kwargs)) / share}  # type: ignore[operator]
    except Exception:  # values that it does not take, or no memory: nothing is at fault
        return {}


def _random(described: TensorMeta, seed: int) -> torch.Tensor:
    """Numbers of a normal distribution; integers are 0, which is a place in anything."""
    made = described.empty()
    if not described.dtype.is_floating_point:
        return made.zero_()
    return made.normal_(generator=torch.Generator(made.device).manual_seed(seed))


def _least(run: Callable[[], Any]) -> float:
    found: list[float] = []
    while len(found) < _RUNS[0] or (len(found) < _RUNS[1] and sum(found) < _ENOUGH):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _per_flop(dtype: torch.dtype) -> float:
    """The seconds that an operation takes in products of matrices, in float32 where there are none of this type."""
    wanted = dtype if dtype.is_floating_point else torch.float32

    def measured() -> Mapping[str, float]:
        matrix = torch.ones(_SIDE, _SIDE, dtype=wanted)
        return {_SECONDS: _least(lambda: matrix @ matrix) / (2 * _SIDE**3)}

    return remembered(("product", str(wanted)), (_SECONDS,), measured).seconds[_SECONDS]


def _per_byte() -> float:
    """The seconds that it takes to read or write a byte."""

    def measured() -> Mapping[str, float]:
        memory = torch.zeros(_COPIED // 4)
        return {_SECONDS: _least(lambda: memory.add(1.0)) / (2 * _COPIED)}

    return remembered(("memory",), (_SECONDS,), measured).seconds[_SECONDS]
