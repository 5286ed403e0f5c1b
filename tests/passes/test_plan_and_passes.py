"""Passes keep the meaning of a program; generated code and printed text equal the interpreter."""

from __future__ import annotations

import torch
from hypothesis import given

from monograph.backends import LOWER, LoweringRequest
from monograph.ir.verify import verify
from monograph.numerics.judge import differences
from monograph.passes.table import pipeline
from monograph.plan.check import check_plan
from monograph.plan.plan import make_plan
from monograph.settings import Settings
from tests.support.programs import example_inputs, interpret, programs


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
    assert not list(
        differences(expected, LOWER["aten"](LoweringRequest(plan, Settings())).runner.run(inputs))
    )


@given(programs())
def test_printed_text_runs(program):
    inputs = example_inputs(program)
    expected = interpret(program, inputs)
    scope: dict = {}
    exec(program.text, scope)
    torch.manual_seed(0)
    assert not list(differences(expected, scope["step"](*inputs)))
