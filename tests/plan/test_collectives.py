"""A collective reads what it is given, and owns what it makes, until it is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from monograph.distributed.programs.collectives import calls_in_order
from monograph.errors import PassError, PlanError
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.passes.cse import cse
from monograph.passes.dce import dce
from monograph.passes.run import Stage, run_passes
from monograph.plan.check import check_plan
from monograph.plan.overwrite import overwrites
from monograph.plan.plan import make_plan
from monograph.plan.updates.failing import can_fail
from monograph.plan.updates.schedule import light_ops
from tests.support.programs import Sketch, aten

c10d = torch.ops._c10d_functional
GATHER, REDUCE, WAIT = c10d.all_to_all_single.default, c10d.all_reduce.default, c10d.wait_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default


def sent(*, late: bool = False, scatter: bool = False) -> tuple[Program, dict[str, fx.Node]]:
    """y = x * x is sent; sin(y) or, with `late`, neg(y) is computed while it is on its way."""
    sketch = Sketch()
    x = sketch.input("x")
    w = sketch.input("model.w", Role.PARAM)
    y = sketch.op(aten.mul.Tensor, x, x)
    how = (SCATTER, y, "sum", 1) if scatter else (GATHER, y, [1, 1], [1, 1])
    begun = sketch.op(*how, "monograph/dp")
    other = sketch.op(aten.sin.default, x if late else y)
    done = sketch.op(WAIT, begun)
    new = sketch.op(aten.add.Tensor, w, done, phase="update")
    program = sketch.finish([(other, Role.USER, "result.0"), (new, Role.STATE, "model.w")])
    return program, {node.name: node for node in program.graph.nodes}


def test_what_a_collective_reads_is_freed_when_it_is_done():
    plan = make_plan(sent()[0])
    check_plan(plan)
    assert set(plan.frees["wait_tensor"]) == {"mul", "all_to_all_single"}
    assert "sin" not in plan.frees


def test_what_a_collective_has_copied_is_freed_when_it_begins():
    program, _ = sent(late=True, scatter=True)
    plan = make_plan(program)
    check_plan(plan)
    assert plan.frees["reduce_scatter_tensor"] == ("mul",)
    assert plan.memory.peak_bytes == 3 * 24  # mul, its copy, and what will come; then sin in the place of mul


def test_the_result_of_a_collective_is_counted_once():
    program, _ = sent()
    plan = make_plan(program)
    held = {item.maker for item in plan.aliases.certain["wait_tensor"]}
    assert held == {"all_to_all_single"}
    assert plan.memory.peak_bytes == 3 * 24  # mul, what comes for it, and sin


@pytest.mark.parametrize("scatter", [False, True])
def test_nothing_writes_over_what_a_collective_reads(scatter):
    program, _ = sent(scatter=scatter)
    assert not overwrites(program.graph, make_plan(program).aliases, apart=())


def test_an_early_free_is_found():
    plan = make_plan(sent()[0])
    spoiled = replace(plan, frees={"sin": ("mul",), "wait_tensor": ("all_to_all_single",)})
    with pytest.raises(
        PlanError, match="what all_to_all_single reads until wait_tensor is done is freed before"
    ):
        check_plan(spoiled)


@pytest.mark.parametrize("scatter", [False, True])
def test_a_write_over_what_is_sent_is_found(scatter):
    plan = make_plan(sent(scatter=scatter)[0])
    spoiled = replace(plan, into={"sin": "mul"})
    name = "reduce_scatter_tensor" if scatter else "all_to_all_single"
    with pytest.raises(PlanError, match=f"sin has overwritten what {name} reads"):
        check_plan(spoiled)


def test_a_read_before_the_wait_is_found():
    sketch = Sketch()
    x = sketch.input("x")
    begun = sketch.op(REDUCE, x, "sum", "monograph/dp")
    early = sketch.op(aten.sin.default, begun)
    done = sketch.op(WAIT, begun)
    program = sketch.finish([(early, Role.USER, "result.0"), (done, Role.USER, "result.1")])
    with pytest.raises(PlanError, match="sin reads all_reduce before all_reduce is done"):
        check_plan(make_plan(program))


def test_a_collective_that_nothing_waits_for_is_found():
    sketch = Sketch()
    x = sketch.input("x")
    sketch.op(REDUCE, x, "sum", "monograph/dp")
    program = sketch.finish([(sketch.op(aten.sin.default, x), Role.USER, "result.0")])
    with pytest.raises(PlanError, match="nothing waits for all_reduce, a collective"):
        check_plan(make_plan(program))


def test_an_all_reduce_sends_a_copy():
    sketch = Sketch()
    x = sketch.input("x")
    y = sketch.op(aten.mul.Tensor, x, x)
    begun = sketch.op(REDUCE, y, "sum", "monograph/dp")
    other = sketch.op(aten.sin.default, x)
    done = sketch.op(WAIT, begun)
    program = sketch.finish([(other, Role.USER, "result.0"), (done, Role.USER, "result.1")])
    plan = make_plan(program)
    check_plan(plan)
    assert plan.frees["all_reduce"] == ("mul",)


def twice() -> Program:
    """Two equal collectives, one of which nothing reads."""
    sketch = Sketch()
    x = sketch.input("x")
    first = sketch.op(WAIT, sketch.op(REDUCE, x, "sum", "monograph/dp"))
    sketch.op(WAIT, sketch.op(REDUCE, x, "sum", "monograph/dp"))
    return sketch.finish([(first, Role.USER, "result.0")])


def test_no_collective_is_dropped_or_merged():
    program = twice()
    assert dce(program) is program
    assert cse(program) is program


def test_a_pass_that_drops_a_collective_is_blamed():
    def drops(program: Program) -> Program:
        nodes = list(program.graph.nodes)
        return program.rebuilt(nodes[:3] + nodes[-1:])

    with pytest.raises(PassError, match="pass drops drops collectives, adds some, or changes their order"):
        run_passes(Stage("capture", twice(), 0.0), [drops])


def test_the_order_of_collectives_has_their_groups():
    assert list(calls_in_order(twice())) == [(REDUCE, ("sum", "monograph/dp"))] * 2


def test_a_collective_refuses_no_values_and_is_no_light_op():
    program, nodes = sent()
    assert not can_fail(nodes["all_to_all_single"])
    assert not can_fail(nodes["wait_tensor"])
    assert not light_ops(program.graph) & {nodes["all_to_all_single"], nodes["wait_tensor"]}
