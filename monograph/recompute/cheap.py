"""What every step computes again: what costs next to nothing, and makes the peak of memory smaller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import OpOverload, is_pointwise, packet_name
from monograph.ir.memory import is_view
from monograph.ir.meta import frozen, metas, value
from monograph.ir.ops.arithmetic import flops
from monograph.recompute.problem import Problem
from monograph.recompute.schedule import Schedule
from monograph.recompute.solve import least_within

SHARE: Final = 0.05  # of the work of a step, which is computed again
COMPILED_SHARE: Final = 0.03  # by compilers: their order of more kernels holds more
LEAST_BYTES: Final = 1 << 17  # that a step holds: with less it is not worth a copy of an op
# Work is counted in operations of a matrix product. A byte that is moved takes as long as so many of them, and so does the
# call of an op: the same for all machines, so that a model is the same program on each.
_PER_BYTE: Final = {"cpu": 12}
_PER_BYTE_ELSEWHERE: Final = 100
_PER_CALL: Final = 200_000
# ops whose arithmetic takes longer than their bytes
_SLOW: Final = "gelu tanh exp sigmoid silu erf log softplus mish elu pow sin cos _softmax _log_softmax"
_SLOWER_BY: Final = 3
# besides element-wise ops, what takes about as long as to move its bytes
_CHEAP: Final = """
    native_layer_norm native_group_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm
    _fused_rms_norm _softmax _log_softmax cat stack clone copy constant_pad_nd _to_copy masked_fill where full zeros ones
    sum mean amax repeat flip roll embedding
"""
_ARE_SLOW: Final = frozenset(f"aten::{name}" for name in _SLOW.split())
_ARE_CHEAP: Final = frozenset(f"aten::{name}" for name in _CHEAP.split())


def cheapest(problem: Problem, nodes: Iterable[fx.Node], share: float) -> Schedule:
    """The schedule of a small peak that computes again at most such a share of the work. `nodes` are all ops of the step."""
    work = _Work()
    whole = sum(map(work.of, nodes))
    return least_within(
        problem, [work.of(unit.node) for unit in problem.units], share * whole, problem.forced
    )


def is_cheap(node: fx.Node) -> bool:
    """True for ops that take about as long as to move their bytes."""
    return is_pointwise(node.target) or packet_name(node.target) in _ARE_CHEAP


def _times_longer(node: fx.Node) -> int:
    """How much longer than its arithmetic an op takes. Backward of a convolution in groups is no product of matrices.

    It takes 5 to 8 times as long (72 Gflop/s, 144 to 960 channels), and ops around it longer than their bytes. The number of groups stands for
    both: with 6 instead, a step of MobileNetV2 holds 67 MiB where it holds 41, and eager mode 99.
    """
    if node.target is not torch.ops.aten.convolution_backward.default:
        return 1
    groups: Any = node.args[9]
    return max(1, (1 + int(groups)) // 2)


class _Work:
    """Predicts the work of ops; those that are alike are counted once."""

    def __init__(self) -> None:
        self._flops: dict[Any, int] = {}

    def of(self, node: fx.Node) -> float:
        """The work of an op."""
        tensors = [item for source in (node, *node.all_input_nodes) for item in metas(value(source))]
        made = next(metas(value(node)), None)
        if made is None or is_view(node):
            return 0.0
        key = frozen([node.target, node.args, dict(node.kwargs)], lambda item: value(item))
        if key not in self._flops:
            self._flops[key] = flops(node) * _times_longer(node)
        per_byte = _PER_BYTE.get(made.device.type, _PER_BYTE_ELSEWHERE)
        slower = (
            _SLOWER_BY if isinstance(node.target, OpOverload) and packet_name(node.target) in _ARE_SLOW else 1
        )
        return self._flops[key] + per_byte * slower * sum(item.nbytes for item in tensors) + _PER_CALL
