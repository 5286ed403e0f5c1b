"""The search for convolution algorithms: on while a step runs, as it was before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monograph.backends.convolutions import with_search
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.ir.meta import TensorMeta, set_value, value
from monograph.ir.program import Program
from monograph.plan.plan import make_plan
from monograph.runtime.runner import Runner
from monograph.settings import Settings
from tests.passes.programs import Sketch, aten, numbers


def program(device: str) -> Program:
    sketch = Sketch()
    x, w = sketch.input("x", numbers(1, 2, 4, 4)), sketch.input("w", numbers(3, 2, 2, 2))
    y = sketch.op(aten.convolution.default, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for node in (x, w, y):
        described = value(node)
        assert isinstance(described, TensorMeta)
        set_value(node, replace(described, device=torch.device(device)))
    return sketch.finish(y)


def seen_by(*, device: str, on: bool, fails: bool = False) -> tuple[list[bool], LoweredProgram]:
    """What cuDNN's switch is while the runner runs."""
    seen: list[bool] = []

    def run(inputs):
        seen.append(torch.backends.cudnn.benchmark)
        if fails:
            raise RuntimeError("no memory")
        return inputs

    order = LoweringRequest(make_plan(program(device)), Settings(conv_heuristic_search=on))
    lowered = with_search(LoweredProgram("aten", Runner(run)), order)
    assert lowered.runner.run([]) == []
    return seen, lowered


@pytest.mark.every_case
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("device", "on", "searches"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_the_switch_is_on_while_a_step_convolves_on_cuda(before, device, on, searches):
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, benchmark=before):
        seen, lowered = seen_by(device=device, on=on)
        assert seen == [searches or before]
        assert torch.backends.cudnn.benchmark is before
    assert ("cuDNN times" in "".join(lowered.notes)) is searches
    assert bool(lowered.notes) is on


def test_the_switch_is_put_back_after_a_failure():
    before = torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="no memory"):
        seen_by(device="cuda", on=True, fails=True)
    assert torch.backends.cudnn.benchmark is before
