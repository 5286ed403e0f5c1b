"""Passes that change rounding: golden texts, the meaning kept up to rounding, and the promise with them on and off."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import monograph as mg
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.numerics.judge import against_float64
from monograph.passes.add_to_output import add_to_output
from monograph.passes.cast_scale import cast_scale
from monograph.passes.model_update import model_update
from monograph.settings import pass_name
from tests.passes.programs import Sketch, aten, body, numbers, programs, run, visible
from tests.support import assert_same
from tests.support.goldens import check_golden

PASSES = (cast_scale, add_to_output, model_update)


@pytest.mark.parametrize("step", PASSES, ids=pass_name)
@given(programs())
def test_the_meaning_is_kept_up_to_rounding(step, drawn):
    program, inputs = drawn
    text = program.text
    after = step(program)
    verify(after, after=pass_name(step))
    for expected, got in zip(run(program, inputs), run(after, inputs), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    before, now = visible(program, inputs), visible(after, inputs)
    assert [before[key] for key in ("layout", "objects", "memory", "random")] == [
        now[key] for key in ("layout", "objects", "memory", "random")
    ]
    assert program.with_graph(program.graph).text == text, "the pass changed the program it was given"


@given(programs())
def test_on_a_cpu_lists_give_the_bits_of_single_tensors(drawn):
    program, inputs = drawn
    assert visible(model_update(program), inputs) == visible(program, inputs)


# --- goldens -----------------------------------------------------------------------------------------------------------


def unscaled() -> tuple[Program, list[Any]]:
    """Gradients in half precision, cast and unscaled; a cast there and back."""
    sketch = Sketch()
    a, b = (sketch.input(name, numbers(3).bfloat16()) for name in ("a", "b"))
    inverse = sketch.input("inverse", torch.tensor(0.25))
    wide = [sketch.op(aten._to_copy.default, item, dtype=torch.float32) for item in (a, b)]
    again = sketch.op(aten._to_copy.default, wide[0], dtype=torch.bfloat16)
    zero = sketch.op(aten.full.default, [], 0.0, dtype=torch.float32)
    both = sketch.op(aten._amp_foreach_non_finite_check_and_unscale.default, wide, zero, inverse)
    items = sketch.op(operator.getitem, both, 0)
    found = sketch.op(operator.getitem, both, 1)
    results = [sketch.op(operator.getitem, items, i) for i in (0, 1)]
    return sketch.finish(*results, found, sketch.op(aten.neg.default, again)), sketch.inputs


def summed() -> tuple[Program, list[Any]]:
    """The gradient of an input of three layers, one of them behind views, and a sum that is read twice."""
    sketch = Sketch()
    x, w = sketch.input("x", numbers(4, 3)), sketch.input("w", numbers(3, 2))
    first, second, third, fourth = (sketch.op(aten.mm.default, x, w) for _ in range(4))
    total = sketch.op(aten.add.Tensor, first, second)
    shown = [sketch.op(aten.view.default, item, [2, 2, 2]) for item in (total, third)]
    total = sketch.op(aten.add.Tensor, *shown)
    twice = sketch.op(aten.add.Tensor, fourth, sketch.op(aten.view.default, total, [4, 2]))
    return sketch.finish(total, sketch.op(aten.mul.Tensor, fourth, twice)), sketch.inputs


def updated() -> tuple[Program, list[Any]]:
    """Three parameters of two types, each with a step counter that its rate depends on."""
    sketch = Sketch()
    lr = sketch.input("lr", 0.1, Role.HYPER)
    new = {}
    for name, dtype in (("a", torch.float32), ("b", torch.float32), ("c", torch.float64)):
        weight = sketch.input(name, numbers(3).to(dtype), Role.PARAM)
        count = sketch.input(f"{name}.step", torch.tensor(3.0), Role.OPTIM)
        gradient = sketch.op(aten.sin.default, weight, phase="backward")
        counted = sketch.op(aten.add.Tensor, count, 1, phase="update")
        number = sketch.op(aten._local_scalar_dense.default, counted, phase="update")
        rate = sketch.op(operator.truediv, lr, number, phase="update")
        decayed = sketch.op(aten.mul.Tensor, weight, 0.5, phase="update")
        scaled = sketch.op(aten.div.Tensor, gradient, rate, phase="update")
        new[name] = sketch.op(aten.addcmul.default, decayed, scaled, gradient, value=lr, phase="update")
        new[f"{name}.step"] = counted
    return sketch.finish(state=new), sketch.inputs


GOLDENS = {cast_scale: unscaled, add_to_output: summed, model_update: updated}


@pytest.mark.parametrize("step", GOLDENS, ids=pass_name)
def test_the_text_before_and_after(step):
    program, inputs = GOLDENS[step]()
    after = step(program)
    verify(after, after=pass_name(step))
    for expected, got in zip(run(program, inputs), run(after, inputs), strict=True):
        torch.testing.assert_close(got, expected)
    check_golden(
        f"passes/{pass_name(step)}.txt",
        f"# before {pass_name(step)}\n{body(program)}\n\n# after\n{body(after)}",
    )


@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_an_infinite_gradient_is_found(fault):
    program, inputs = unscaled()
    inputs[1][2] = fault
    for before, after in zip(run(program, inputs), run(cast_scale(program), inputs), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert run(cast_scale(program), inputs)[2] == 1.0


def test_a_cast_to_less_digits_and_back_stays():
    sketch = Sketch()
    x = sketch.input("x", numbers(5).double() / 3)
    narrow = sketch.op(aten._to_copy.default, x, dtype=torch.float32)
    again = sketch.op(aten._to_copy.default, narrow, dtype=torch.float64)
    program = sketch.finish(sketch.op(aten.neg.default, again))
    assert cast_scale(program) is program


@pytest.mark.parametrize("target", [aten.addcmul.default, aten.addcdiv.default], ids=str)
def test_a_product_without_a_factor_is_taken_once(target):
    sketch, new = Sketch(), {}
    for name in ("a", "b"):
        weight = sketch.input(name, numbers(3), Role.PARAM)
        gradient = sketch.op(aten.exp.default, weight, phase="backward")
        new[name] = sketch.op(target, weight, gradient, gradient, phase="update")
    program = sketch.finish(state=new)
    after = model_update(program)
    assert len(list(after.ops())) < len(list(program.ops())) + 2, "one op for both"
    assert visible(after, sketch.inputs) == visible(program, sketch.inputs)


@pytest.mark.parametrize("step", PASSES, ids=pass_name)
def test_a_program_without_such_ops_stays_itself(step):
    sketch = Sketch()
    program = sketch.finish(sketch.op(aten.sin.default, sketch.input("x", numbers(2))))
    assert step(program) is program


# --- on and off ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Three layers read one input: its gradient is a sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.tanh(x)
        mixed = torch.softmax(self.query(x) @ self.key(x).transpose(-2, -1), -1) @ self.value(x)
        return self.last(mixed + self.query(x))


@dataclass(frozen=True)
class Switch:
    """A switch of the configuration with the pass it is for."""

    name: str
    turn: Callable[[Any, bool], None]
    mixed: bool = False

    def __str__(self) -> str:
        return self.name


SWITCHES = (
    Switch("add_to_output", lambda config, mode: config.allow_fuse_add_to_output(mode)),
    Switch("model_update", lambda config, mode: config.allow_fuse_model_update_ops(mode)),
    Switch("cast_scale", lambda config, mode: config.allow_fuse_cast_scale(mode), mixed=True),
)


class Step(mg.Graph):
    def __init__(self, switch: Switch, on: bool | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = Attention().to(dtype)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-4))
        if switch.mixed and dtype is torch.float32:
            self.config.enable_amp(dtype=torch.bfloat16)
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
        if on is not None:
            switch.turn(self.config, on)

    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss


def trained(
    switch: Switch, seed: int, on: bool | None, dtype: torch.dtype = torch.float32, *, eagerly: bool = False
) -> tuple[Step, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    step = Step(switch, on)
    if dtype is torch.float64:
        state = step.model.state_dict()
        step = Step(switch, on, dtype)
        step.model.load_state_dict(state)
    for _ in range(3):
        x, y = torch.randn(2, 5, 8, dtype=torch.float32), torch.randint(4, (2, 5))
        (step.eager if eagerly else step)(x.to(dtype), y)
    return step, dict(step.model.state_dict())


@pytest.mark.one_case
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_on_and_off_keep_the_promise(switch, seed):
    _, exact = trained(switch, seed, None, torch.float64, eagerly=True)
    _, eager = trained(switch, seed, None, eagerly=True)
    off, unfused = trained(switch, seed, False)
    on, fused = trained(switch, seed, True)
    assert_same(eager, unfused)
    report = against_float64(exact, eager, fused)
    assert report.ok, report
    assert on.builds[0].program.text != off.builds[0].program.text
    assert on.diff(switch.name)
    assert f"{switch.name}: " in on.explain()
    assert switch.name in [stage.name for stage in on.builds[0].stages]
    assert switch.name not in [stage.name for stage in off.builds[0].stages]


@pytest.mark.one_case
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_on_aten_they_are_off_unless_asked_for(switch):
    step, _ = trained(switch, 0, None)
    assert switch.name not in [stage.name for stage in step.builds[0].stages]
    assert "off: " in step.explain()
    with pytest.raises(mg.DefinitionError, match=f"'{switch.name}' did not run") as caught:
        step.diff(switch.name)
    assert "allow_fuse" in str(caught.value)


def test_a_switch_makes_a_new_build():
    step, _ = trained(SWITCHES[1], 0, True)
    SWITCHES[1].turn(step.config, False)
    step(torch.randn(2, 5, 8), torch.randint(4, (2, 5)))
    assert len(step.builds) == 2
    assert "model_update=True" in step.builds[1].reason


@st.composite
def forms(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 3), max_size=2)))


@given(st.lists(forms(), min_size=2, max_size=6))
def test_parameters_of_any_form_are_updated_together(shapes):
    sketch, new = Sketch(), {}
    for index, shape in enumerate(shapes):
        weight = sketch.input(f"w{index}", numbers(*shape, seed=index), Role.PARAM)
        new[f"w{index}"] = sketch.op(aten.mul.Tensor, weight, 0.5, phase="update")
    program = sketch.finish(state=new)
    after = model_update(program)
    assert [node.target for node in after.ops()].count(aten._foreach_mul.Scalar) == 1
    assert visible(after, sketch.inputs) == visible(program, sketch.inputs)
