"""`align` with the compiled mode: results, views, gradients, random numbers, changed arguments; and a wrong compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from monograph import backends
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.testing import MODES, AlignmentError, align


def views(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    """Results that show arguments, each other, and memory of their own; random numbers between them; a changed one."""
    product = x @ y
    noisy = nn.functional.dropout(product, 0.4)
    y.mul_(0.5)
    return x.t(), product, product[0], noisy, torch.randn(3), y[1:]


@pytest.mark.long
def test_whatever_can_be_seen_is_as_in_eager_mode():
    align(views, torch.randn(3, 4), torch.randn(4, 5), modes=("inductor",), grad=False)


@pytest.mark.long
def test_a_module_with_its_gradients_and_updates():
    module = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout(0.2))
    align(module, torch.randn(4, 2, 6, 6), modes=("inductor",))


def test_a_compiler_that_is_wrong_by_a_thousandth_is_caught(monkeypatch):
    def wrong(order: LoweringRequest) -> LoweredProgram:
        lowered = backends.aten.lower(order)
        run = lowered.runner.run

        def off(inputs: list[Any]) -> Any:
            return [item * 1.001 for item in run(inputs)]

        return replace(lowered, backend="inductor", runner=replace(lowered.runner, run=off))

    monkeypatch.setitem(backends.LOWER, "inductor", wrong)
    with pytest.raises(AlignmentError, match="inductor"):
        align(torch.tanh, torch.randn(5), modes=("inductor",), grad=False)


def test_the_mode_promises_a_distance():
    assert not MODES["inductor"].bitwise
