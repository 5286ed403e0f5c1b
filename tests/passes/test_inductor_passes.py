"""Passes for the compiler: what they write means the same, and no op is left that the compiler gets wrong."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.ir.meta import form
from monograph.ir.own_ops import RECURRENT_LAYER
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.passes.inductor.check_values import check_values
from monograph.passes.inductor.foreach_to_single import foreach_to_single
from monograph.passes.inductor.recurrent import recurrent
from monograph.passes.inductor.small_types import small_types
from monograph.passes.inductor.stack_numbers import stack_numbers
from monograph.passes.inductor.wide_halves import wide_halves
from monograph.passes.inductor.wide_variances import wide_variances
from monograph.passes.run import Pass
from tests.passes.programs import Sketch, aten, numbers, run
from tests.support import assert_same


def written(step: Pass, sketch: Sketch, *results: fx.Node) -> Program:
    """What a pass makes of a program, which gives the same bits as before."""
    program = sketch.finish(*results)
    after = step(program)
    verify(after, after="the pass")
    assert_same(run(program, sketch.inputs), run(after, sketch.inputs))
    return after


def calls_of(program: Program, target: Any) -> list[fx.Node]:
    return [node for node in program.ops() if node.target is target]


# --- numbers of lists ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [aten._foreach_addcmul, aten._foreach_addcdiv])
def test_an_op_on_lists_keeps_its_number(target: Any) -> None:
    sketch = Sketch()
    lists = [[sketch.input(f"{name}{i}", numbers(3, seed=i)) for i in (1, 2)] for name in "abc"]
    both = sketch.op(target.Scalar, *lists, 0.5)
    single = written(foreach_to_single, sketch, *(sketch.op(operator.getitem, both, i) for i in (0, 1)))
    assert not calls_of(single, target.Scalar)


def test_each_parameter_gets_the_number_of_its_own_counter() -> None:
    """Parameters that were added later have made fewer steps."""
    sketch, numbers_of_all = Sketch(), []
    for index, steps in enumerate((3.0, 7.0, 1.0)):
        count = sketch.input(f"weight{index}.step", torch.tensor(steps), Role.OPTIM)
        counted = sketch.op(aten.add.Tensor, count, 1, phase="update")
        wide = sketch.op(aten._to_copy.default, counted, dtype=torch.float64, phase="update")
        power = sketch.op(aten.pow.Scalar, 0.9, wide)
        numbers_of_all.append(sketch.op(aten.rsub.Scalar, power, 1.0))
    together = written(stack_numbers, sketch, *numbers_of_all)
    assert len(calls_of(together, aten.pow.Scalar)) == 1


# --- types -----------------------------------------------------------------------------------------------------------


def test_no_sum_of_truth_values_has_a_factor() -> None:
    """The compiler computes it in int64, and writes it over what lies behind the result."""
    sketch = Sketch()
    x, y = sketch.input("x", numbers(5) > 0), sketch.input("y", numbers(5, seed=1) > 0)
    sums = [sketch.op(aten.add.Tensor, x, y, alpha=alpha) for alpha in (0, 1, 2)]
    after = written(small_types, sketch, *sums)
    assert all(node.kwargs.get("alpha", 1) == 1 for node in calls_of(after, aten.add.Tensor))


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.sub.Tensor])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_with_a_factor_is_not_rounded_to_a_half_type(target: Any, dtype: torch.dtype) -> None:
    """The compiler would round it before the sum, which eager's kernels do not."""
    sketch = Sketch()
    x, y = (sketch.input(name, numbers(64, seed=seed).to(dtype)) for seed, name in enumerate("xy"))
    after = written(wide_halves, sketch, sketch.op(target, x, y, alpha=0.3), sketch.op(target, x, y))
    for node in after.ops():
        made = form(node)
        assert made is not None
        assert not made.is_half or node.kwargs.get("alpha", 1) == 1
        assert node.target is not aten.mul.Tensor or made.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variances_are_of_float64(dtype: torch.dtype) -> None:
    """The compiler squares numbers in the type that it is given."""
    sketch = Sketch()
    x = sketch.input("x", numbers(4, 5).to(dtype))
    deviation = sketch.op(aten.std.correction, x, [1], correction=1)
    both = sketch.op(aten.var_mean.correction, x, [0], correction=0)
    parts = [sketch.op(operator.getitem, both, index) for index in (0, 1)]
    program = sketch.finish(deviation, *parts)
    after = wide_variances(program)
    for old, new in zip(run(program, sketch.inputs), run(after, sketch.inputs), strict=True):
        torch.testing.assert_close(new, old)
    for target in (aten.std.correction, aten.var_mean.correction):
        (node,) = calls_of(after, target)
        assert form(node.args[0]).dtype is torch.float64


# --- what eager mode's kernels do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [-0.5, 1.5, float("nan")])
def test_chances_are_checked_before_they_are_used(chance: float) -> None:
    sketch = Sketch()
    drawn = sketch.op(aten.bernoulli.default, sketch.input("chances", torch.tensor([0.0, 1.0])))
    after = written(check_values, sketch, drawn)
    with pytest.raises(RuntimeError, match=r"aten\.bernoulli\.default takes other values"):
        run(after, [torch.tensor([0.5, chance])])


@pytest.mark.parametrize("trains", [False, True])
def test_a_recurrent_layer_keeps_what_a_backward_needs_only_for_one(trains: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4)

    class Layer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def build(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(trains):
                return self.layer(x)[0]

    graph = Layer()
    graph(torch.randn(2, 1, 3))
    before = graph.builds[0].plan.program
    assert len(calls_of(before, aten.mkldnn_rnn_layer.default)) == 1
    assert len(calls_of(recurrent(before), RECURRENT_LAYER)) == trains
