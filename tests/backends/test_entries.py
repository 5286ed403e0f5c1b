"""Torch's own functions stand for ops only where they call these very ops, and are found without work or random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.backends.python import entries as entries_file
from monograph.backends.python.entries import Invocation, entries
from monograph.compat.ops import direct_call
from tests.plan.drawn import aten, start

HUGE = [1 << 20, 1 << 16]  # 256 GiB


def entry(op: Any, *args: Any, **kwargs: Any) -> Any:
    return entries([Invocation(op, args, kwargs)])[op]


def test_functions_that_call_the_op_are_taken() -> None:
    drawing = start()
    x, y, *_ = drawing.made
    assert entry(aten.mul.Tensor, x, y) is torch.mul
    assert entry(aten.mul.Tensor, x, 0.5) is torch.mul
    assert entry(aten.add_.Tensor, x, y, alpha=2) is torch.Tensor.add_
    assert entry(aten.gelu.default, x) is torch._C._nn.gelu


def test_other_ops_are_called_directly() -> None:
    drawing = start()
    x, *_ = drawing.made
    for op, args in (
        (aten.mul.Scalar, (x, 0.5)),  # torch.mul calls another one
        (aten.bernoulli.p, (x, 0.5)),  # draws
        (aten.gelu_backward.default, (x, x)),  # has no function
    ):
        assert entry(op, *args) == direct_call(op)


def test_an_op_that_is_called_in_two_ways_needs_a_function_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = start()
    x, y, *_ = drawing.made
    both = [Invocation(aten.mul.Tensor, (x, y), {}), Invocation(aten.mul.Tensor, (x, 0.5), {})]
    seen = entries_file._calls_by
    monkeypatch.setattr(entries_file, "_KNOWN", {})
    monkeypatch.setattr(
        entries_file, "_calls_by", lambda function, call: seen(function, call) if y in call.args else None
    )
    assert entries(both)[aten.mul.Tensor] == direct_call(aten.mul.Tensor)


def test_nothing_is_allocated_or_drawn() -> None:
    state = torch.get_rng_state()
    entry(aten.full.default, HUGE, 1.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
    assert torch.equal(state, torch.get_rng_state())
