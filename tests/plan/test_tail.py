"""The ops that run last, in place and many at once: random programs run for real, and what is left apart."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monograph.backends import LoweringRequest, lower
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.plan.plan import make_plan
from monograph.plan.updates import groups
from monograph.plan.updates.counterparts import op_in_place
from monograph.plan.updates.schedule import schedule
from monograph.plan.updates.tail import Tail, tail_of
from monograph.runtime.runner import Runner
from monograph.settings import Settings
from tests.plan.drawn import STATES, Drawing, aten, expected, fresh_inputs, programs, start
from tests.support import assert_same

W, V, M = STATES


def lowered(program: Program) -> Runner:
    """What runs a program, all its state in memory of its own."""
    plan = make_plan(program)
    return lower(LoweringRequest(plan, Settings(), frozenset(plan.in_place))).runner


def run(runner: Runner, program: Program, inputs: list[Any]) -> dict[str, Any]:
    """The results of a step and its new state, wherever that is."""
    with torch.no_grad():
        values = runner.run(inputs)
        outputs = list(values if runner.update is None else runner.update(values))
    state = {port.path: item for port, item in zip(program.inputs, inputs, strict=True)}
    given = zip(program.outputs, outputs, range(len(outputs)), strict=True)
    new = {port.path: item for port, item, index in given if index not in runner.written}
    return {**state, **new}


def assert_right(program: Program) -> Runner:
    """The runner of a program gives what torch's own interpreter gives, and leaves all else as it was."""
    wanted = expected(program, fresh_inputs(program))
    runner = lowered(program)
    inputs = fresh_inputs(program)
    got = run(runner, program, inputs)
    results = [got[port.path] for port in program.outputs if port.role is Role.USER]
    assert_same(wanted.results, results)
    assert_same(wanted.state, {path: got[path] for path in wanted.state})
    new = {program.outputs[index].path for index in runner.written}
    for port, before, after in zip(program.inputs, fresh_inputs(program), inputs, strict=True):
        if port.path not in new:
            assert_same(before, after, port.path)
    return runner


@given(programs())
def test_random_programs_run_in_two_parts(program: Program) -> None:
    assert_right(program)


@st.composite
def updates(draw: st.DrawFn) -> Program:
    """Updates as optimizers have them: chains of arithmetic on state, on what they made, and on numbers."""
    drawing = start()
    x, y, *state = drawing.made
    gradients = [
        drawing.op(aten.mm.default, x, drawing.op(aten.mm.default, drawing.op(aten.t.default, y), item))
        for item in state
    ]
    values = {item: item for item in state}
    temporaries = list(gradients)
    for _ in range(draw(st.integers(3, 20))):
        old = draw(st.sampled_from(state))
        first = draw(st.sampled_from([values[old], draw(st.sampled_from(temporaries))]))
        other: Any = draw(st.sampled_from([*values.values(), *state, *temporaries, 0.5, 3]))
        target = draw(
            st.sampled_from((aten.add.Tensor, aten.mul.Tensor, aten.lerp.Scalar, aten.sqrt.default))
        )
        if target is aten.sqrt.default:
            made = drawing.op(target, first)
        elif target is aten.lerp.Scalar:
            made = drawing.op(target, first, draw(st.sampled_from(temporaries)), 0.25)
        else:
            made = drawing.op(target, first, other)
        if first is values[old]:
            values[old] = made
        else:
            temporaries.append(made)
    outputs = [
        (new, Role.STATE, path)
        for (_, new), path in zip(values.items(), STATES, strict=True)
        if new not in state
    ]
    outputs += [(draw(st.sampled_from(temporaries)), Role.USER, "result.0")] if draw(st.booleans()) else []
    outputs = outputs or [(gradients[0], Role.USER, "result.0")]
    return drawing.finish(outputs[-1:] + outputs[:-1] if outputs[-1][1] is Role.USER else outputs)


@given(updates())
def test_random_updates_run_in_two_parts(program: Program) -> None:
    assert_right(program)


def sgd(drawing: Drawing, *, alike: int = 3) -> list[tuple[Any, Role, str]]:
    """An update of several pieces of state."""
    x, y, *state = drawing.made
    made = []
    for old in state[:alike]:
        gradient = drawing.op(
            aten.mm.default, drawing.op(aten.mm.default, x, drawing.op(aten.t.default, y)), old
        )
        decayed = drawing.op(aten.add.Tensor, drawing.op(aten.mul.Tensor, old, 0.5), gradient)
        made.append(drawing.op(aten.sub.Tensor, decayed, drawing.op(aten.mul.Tensor, gradient, 0.1)))
    return [(new, Role.STATE, path) for new, path in zip(made, STATES, strict=False)]


def tail(program: Program) -> Tail | None:
    plan = make_plan(program)
    return tail_of(plan, plan.in_place)


def tail_calls(program: Program, **options: Any) -> list[groups.TailCall]:
    """The calls of a tail, in the order in which they run."""
    plan = make_plan(program)
    found = tail_of(plan, plan.in_place)
    assert found is not None
    names = {op.name for op in found.ops}
    return [call for call in schedule(plan, found, **options).second if call.ops[0].name in names]


def test_updates_that_are_alike_run_as_one_op() -> None:
    drawing = start()
    program = drawing.finish(sgd(drawing))
    found = tail(program)
    assert found is not None
    assert found.written == {0, 1, 2}
    assert len(found.families) == 3
    assert [len(call.ops) for call in tail_calls(program)] == [3, 3, 3, 3]
    assert assert_right(program).written == {0, 1, 2}


def test_a_chunk_is_as_large_as_its_bytes_allow() -> None:
    drawing = start()
    program = drawing.finish(sgd(drawing))
    found = tail(program)
    assert found is not None
    two = 2 * groups._nbytes(found.ops[0])
    assert [len(call.ops) for call in tail_calls(program, chunk_bytes=two)] == [2, 2, 2, 2, 1, 1, 1, 1]


def test_counters_that_numbers_are_read_from_run_together_before_the_tail() -> None:
    drawing = start()
    counters = [drawing.input(f"optimizer.0/{name}/step", Role.OPTIM, torch.tensor(3.0)) for name in STATES]
    _, _, *state = list(drawing.made)[:5]
    outputs = []
    for old, counter, path in zip(state, counters, STATES, strict=True):
        step = drawing.op(aten.add.Tensor, counter, 1)
        number = drawing.op(aten._local_scalar_dense.default, step)
        outputs.append((drawing.op(aten.mul.Tensor, old, number), Role.STATE, path))
        outputs.append((step, Role.STATE, f"optimizer.0/{path}/step"))
    program = drawing.finish(outputs)
    found = tail(program)
    assert found is not None
    assert found.written == {0, 2, 4}
    assert [len(call.ops) for call in groups.early_calls_of(found)] == [3]


def test_state_that_is_read_after_its_last_op_stays_apart() -> None:
    drawing = start()
    _, _, w, v, _ = drawing.made
    shown = drawing.op(aten.t.default, w)
    product = drawing.op(aten.mm.default, v, shown)
    new = drawing.op(aten.add.Tensor, w, drawing.op(aten.mm.default, product, w))
    other = drawing.op(aten.mul.Tensor, v, w)  # behind the write
    program = drawing.finish([(new, Role.STATE, W), (other, Role.STATE, V)])
    found = tail(program)
    assert found is not None
    assert found.written == {1}
    assert_right(program)


FAILING: dict[str, Any] = {
    "an index": lambda d, w: d.op(
        aten.index_select.default, w, 0, d.op(aten.argsort.default, d.op(aten.sum.dim_IntList, w, [1]))
    ),
    "a matrix product": lambda d, w: d.op(
        aten.mm.default, d.op(aten.mm.default, w, d.op(aten.t.default, w)), w
    ),
    "a random number": lambda d, w: d.op(aten.bernoulli.p, w, 0.5),
    "an integer": lambda d, w: d.op(
        aten.add.Tensor, w, d.op(aten.remainder.Scalar, d.op(aten.argsort.default, w), 2)
    ),
}


@pytest.mark.parametrize("what", FAILING)
def test_only_what_takes_all_values_is_in_the_tail(what: str) -> None:
    drawing = start()
    w = list(drawing.made)[2]
    new = drawing.op(aten.add.Tensor, w, FAILING[what](drawing, w))
    last = drawing.op(aten.mul.Tensor, new, 0.5)
    program = drawing.finish([(last, Role.STATE, W)])
    found = tail(program)
    assert found is not None
    assert found.ops == (new, last)
    if what != "a random number":
        assert_right(program)


def test_an_argument_and_complex_numbers_keep_state_apart() -> None:
    drawing = start()
    x, _, w, _, _ = drawing.made
    assert tail(drawing.finish([(drawing.op(aten.add.Tensor, w, x), Role.STATE, W)])) is None
    drawing = start()
    _, _, w, v, _ = drawing.made
    part = drawing.op(aten.view_as_real.default, drawing.op(aten.complex.default, w, v))
    new = drawing.op(aten.add.Tensor, w, drawing.op(aten.select.int, part, -1, 1))
    assert tail(drawing.finish([(new, Role.STATE, W)])) is None


def test_ops_in_place_are_found_by_their_schemas() -> None:
    assert op_in_place(aten.lerp.Scalar) is aten.lerp_.Scalar
    assert op_in_place(aten.addcdiv.default) is aten.addcdiv_.default
    assert op_in_place(aten.maximum.default) is None
    assert op_in_place(aten.mm.default) is None
    assert op_in_place(torch.ops.monograph.product.default) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_types_with_numbers_are_not_in_place(dtype: torch.dtype) -> None:
    """In place they round the number to the type first."""
    drawing = Drawing()
    w = drawing.input(W, Role.PARAM, torch.randn(301).to(dtype))
    new = drawing.op(aten.mul.Scalar, drawing.op(aten.neg.default, w), 0.1)
    program = drawing.finish([(new, Role.STATE, W)])
    found = tail(program)
    assert found is None or new not in found.into
    assert_right(program)


@pytest.mark.every_case
@pytest.mark.parametrize("gradient", ["of its own", "a view of state", "an argument"])
def test_a_fused_update_is_in_place_where_it_is_given_no_memory_twice(gradient: str) -> None:
    drawing = start()
    x, y, w, v, _ = drawing.made
    given = {
        "of its own": lambda: drawing.op(aten.mul.Tensor, x, x),
        "a view of state": lambda: drawing.op(aten.detach.default, v),
        "an argument": lambda: x,
    }[gradient]()
    numbers = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    lists = [v, w], [drawing.op(aten.mul.Tensor, x, y), given], []
    made = drawing.op(torch.ops.monograph.fused_sgd.default, *lists, **numbers, **flags)
    new = drawing.op(operator.getitem, made, 0)
    copies = [
        drawing.op(aten.copy.default, old, drawing.op(operator.getitem, new, index))
        for index, old in enumerate((v, w))
    ]
    program = drawing.finish([(copies[0], Role.STATE, V), (copies[1], Role.STATE, W)])
    found = tail(program)
    assert (found is not None and made in found.into) == (gradient == "of its own")
    assert_right(program)


@pytest.mark.every_case
@pytest.mark.parametrize("is_read", [False, True])
def test_counters_of_a_fused_update_are_its_own_where_nothing_else_reads_them(is_read: bool) -> None:
    drawing = start()
    x, y, w, v, _ = drawing.made
    counter = drawing.input("optimizer.0/model.w/step", Role.PARAM, torch.tensor(3.0))
    step = drawing.op(aten.add.Tensor, counter, 1)
    numbers = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    gradient = drawing.op(aten.mul.Tensor, x, y)
    made = drawing.op(torch.ops.monograph.fused_adagrad.default, [w], [gradient], [v], [step], **numbers)
    outputs: list[Any] = []
    for index, old, path in ((0, w, W), (2, v, V), (3, step, "optimizer.0/model.w/step")):
        item = drawing.op(operator.getitem, drawing.op(operator.getitem, made, index), 0)
        outputs.append((drawing.op(aten.copy.default, old, item), Role.STATE, path))
    if is_read:
        outputs.append((drawing.op(aten.neg.default, step), Role.USER, "result.0"))
    program = drawing.finish(outputs)
    found = tail(program)
    assert (found is not None and made in found.into) == (not is_read)
    assert_right(program)
