"""Each rule of a program: one that breaks it is refused, and the message names rule and fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from monograph.errors import PassError
from monograph.ir.meta import set_origin, set_value, tensor_meta
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.verify import RULES, verify
from monograph.sizes.expression import Expression
from monograph.sizes.size import Size
from monograph.user_code.lines import Origin
from tests.support.programs import aten, small_program


def node(program: Program, name: str) -> fx.Node:
    return next(item for item in program.graph.nodes if item.name == name)


def missing_port(program: Program) -> Program:
    return replace(program, inputs=program.inputs[:1])


def missing_output(program: Program) -> Program:
    return replace(program, outputs=program.outputs[:1])


def doubled_path(program: Program) -> Program:
    return replace(program, inputs=(program.inputs[0], replace(program.inputs[1], path="x")))


def use_before_made(program: Program) -> Program:
    node(program, "relu").append(node(program, "mul"))
    return program


def write_in_place(program: Program) -> Program:
    node(program, "relu").target = aten.relu_.default
    return program


def foreign_call(program: Program) -> Program:
    node(program, "relu").target = test_a_sound_program_passes
    return program


def wrong_shape(program: Program) -> Program:
    set_value(node(program, "add"), tensor_meta(torch.empty(5)))
    return program


def aliased_update(program: Program) -> Program:
    output = program.graph.output_node()
    output.args = ((output.args[0][0], node(program, "model_w")),)
    return program


def no_phase(program: Program) -> Program:
    set_origin(node(program, "relu"), Origin())
    return program


def size_of_the_capture(program: Program) -> Program:
    node(program, "mul").args = (node(program, "mul").args[0], Size(3, Expression.of("rows")))
    return program


CASES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "inputs match ports": (missing_port, "placeholders"),
    "outputs match ports": (missing_output, "2 outputs against 1"),
    "paths are unique": (doubled_path, "'x' stands twice"),
    "values come before use": (use_before_made, "before it is made"),
    "nothing is written": (write_in_place, "aten.relu_.default changes an input"),
    "targets are known": (foreign_call, "calls"),
    "updates fit their state": (wrong_shape, "model.w is f32[2, 3] and would become f32[5]"),
    "updates do not alias inputs": (aliased_update, "is the input model_w"),
    "values are described": (no_phase, "relu has no phase"),
    "sizes are computed": (size_of_the_capture, "mul takes the size rows of the capture"),
}


def test_a_sound_program_passes():
    verify(small_program(), after="capture")


@pytest.mark.every_case
@pytest.mark.parametrize("rule", CASES)
def test_a_broken_rule_is_named(rule):
    breaking, fault = CASES[rule]
    with pytest.raises(PassError) as caught:
        verify(breaking(small_program()), after="fuse")
    assert f"after fuse: rule '{rule}' is broken" in str(caught.value)
    assert fault in str(caught.value)


def test_every_rule_has_a_case():
    assert {rule.__name__.replace("_", " ") for rule in RULES} == set(CASES)


def test_ports_are_typed():
    port = Port("w", Role.PARAM, "model.w")
    assert port.role == "param"
