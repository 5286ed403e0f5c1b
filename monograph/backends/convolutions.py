"""cuDNN's search for the fastest convolution algorithms, switched for the steps of one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.ir.meta import TensorMeta, value
from monograph.ir.program import Program

_CONVOLUTIONS = frozenset((torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default))


def with_search(lowered: LoweredProgram, order: LoweringRequest) -> LoweredProgram:
    """The same with `torch.backends.cudnn.benchmark` on while it runs, if the settings ask for it."""
    if not order.settings.conv_heuristic_search:
        return lowered
    if not _convolves_on_cuda(order.plan.program):
        return replace(lowered, notes=(*lowered.notes, "conv_heuristic_search: no convolution on CUDA"))
    return replace(
        lowered,
        runner=replace(lowered.runner, run=_searching(lowered.runner.run)),
        notes=(*lowered.notes, "conv_heuristic_search: cuDNN times its algorithms in the first steps"),
    )


def _searching(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    def searching(inputs: list[Any]) -> Sequence[Any]:
        cudnn = torch.backends.cudnn
        others = {"deterministic": cudnn.deterministic, "allow_tf32": cudnn.allow_tf32}
        with cudnn.flags(enabled=cudnn.enabled, benchmark=True, **others):
            return run(inputs)

    return searching


def _convolves_on_cuda(program: Program) -> bool:
    return any(
        isinstance(described := value(item), TensorMeta) and described.device.type == "cuda"
        for node in program.ops()
        if node.target in _CONVOLUTIONS
        for item in node.all_input_nodes
    )
