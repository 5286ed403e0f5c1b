"""Plans free each value once and never too early; passes keep the meaning; generated code equals the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from monograph.backends import LOWER
from monograph.config import Settings
from monograph.errors import PassError, PlanError
from monograph.ir.verify import verify
from monograph.passes import Stage, pipeline, run_passes
from monograph.plan.check import check_plan
from monograph.plan.plan import make_plan
from monograph.runtime.judge import differences
from tests.unit.programs import example_inputs, interpret, programs, small_program


@given(programs())
def test_every_pass_keeps_the_meaning(program):
    inputs = example_inputs(program)
    expected = interpret(program, inputs)
    for step in pipeline(Settings()):
        program = step(program)
        verify(program, after=step.__name__)
        assert not list(differences(expected, interpret(program, inputs)))


@given(programs())
def test_generated_code_equals_the_interpreter(program):
    inputs = example_inputs(program)
    expected = interpret(program, inputs)
    plan = make_plan(program)
    check_plan(plan)
    torch.manual_seed(0)
    assert not list(differences(expected, LOWER["aten"](plan)(*inputs)))


@given(programs())
def test_printed_text_runs(program):
    inputs = example_inputs(program)
    expected = interpret(program, inputs)
    scope: dict = {}
    exec(program.text, scope)
    torch.manual_seed(0)
    assert not list(differences(expected, scope["step"](*inputs)))


@given(programs())
def test_a_plan_frees_every_value_that_is_not_returned(program):
    plan = make_plan(program)
    freed = [name for names in plan.frees.values() for name in names]
    returned = {node.name for node in program.graph.output_node().all_input_nodes}
    computed = {node.name for node in program.graph.nodes if node.op == "call_function"}
    assert len(freed) == len(set(freed))
    assert set(freed) == computed - returned


def test_a_read_after_a_free_is_found():
    plan = make_plan(small_program())
    spoiled = replace(plan, frees={**plan.frees, "mul": ("mul",)})
    with pytest.raises(PlanError, match="reads mul, which is not there"):
        check_plan(spoiled)


def test_a_double_free_is_found():
    plan = make_plan(small_program())
    spoiled = replace(plan, frees={**plan.frees, "add": ("mul",)})
    with pytest.raises(PlanError, match="mul is freed after add, but it is not there"):
        check_plan(spoiled)


def test_dead_ops_go_and_random_ones_stay():
    (step,) = pipeline(Settings())
    names = [node.name for node in step(small_program()).graph.nodes]
    assert "neg" not in names
    assert {"mul", "relu", "add"} <= set(names)


def test_the_runner_keeps_stages_and_blames_by_name():
    def spoil(program):
        return replace(program, inputs=())

    def crash(program):
        raise KeyError("lost")

    first = Stage("capture", small_program(), 0.0)
    stages = run_passes(first, pipeline(Settings()))
    assert [stage.name for stage in stages] == ["capture", "dce"]
    with pytest.raises(PassError, match="after spoil"):
        run_passes(first, [spoil])
    with pytest.raises(PassError, match="pass crash failed: KeyError"):
        run_passes(first, [crash])
