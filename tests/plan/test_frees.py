"""Plans free each value once, and never too early."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from monograph.errors import PlanError
from monograph.plan.alias import aliases
from monograph.plan.check import check_plan
from monograph.plan.lifetime import Lifetime, lifetimes
from monograph.plan.plan import make_plan
from tests.plan.drawn import programs
from tests.support.programs import small_program


@given(programs())
def test_a_plan_frees_every_value_that_is_not_returned(program):
    plan = make_plan(program)
    freed = [name for names in plan.frees.values() for name in names]
    returned = {node.name for node in program.graph.output_node().all_input_nodes}
    computed = {node.name for node in program.graph.nodes if node.op == "call_function"}
    assert len(freed) == len(set(freed))
    assert set(freed) == computed - returned


def test_a_storage_lives_from_its_op_to_the_last_reader():
    program = small_program()
    memory = aliases(program)
    lives = {storage.maker: life for storage, life in lifetimes(program.graph, memory).items()}
    assert lives["mul"] == Lifetime("mul", "relu")
    assert lives["neg"] == Lifetime("neg", "neg")
    assert lives["model_w"] == Lifetime("model_w", "add")
    assert lives["relu"] == Lifetime("relu", "output")


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
