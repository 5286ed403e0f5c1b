"""Which outputs may replace their inputs in place, and from when on."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.errors import PlanError
from monograph.ir.port import Role
from monograph.plan.check import check_plan
from monograph.plan.in_place import InPlace
from monograph.plan.plan import Plan, make_plan
from tests.plan.drawn import Drawing, aten, start

W = "model.w"


def drawn() -> tuple[Drawing, fx.Node, fx.Node, fx.Node]:
    """A program that begins with an argument and two pieces of state."""
    drawing = start()
    x, _, w, v, _ = drawing.made
    return drawing, x, w, v


def planned(drawing: Drawing, new: fx.Node, *returned: fx.Node) -> Plan:
    """The plan of a program in which `new` becomes model.w."""
    outputs = [(node, Role.USER, f"result.{i}") for i, node in enumerate(returned)]
    plan = make_plan(drawing.finish([*outputs, (new, Role.STATE, W)]))
    check_plan(plan)
    return plan


def test_new_state_replaces_the_old_one_as_soon_as_it_is_made():
    drawing, x, w, _ = drawn()
    gradient = drawing.op(aten.mul.Tensor, w, x)
    new = drawing.op(aten.sub.Tensor, w, gradient)
    loss = drawing.op(aten.sum.default, gradient)
    plan = planned(drawing, new, loss)
    assert plan.in_place == {1: InPlace("model_w", new.name, new.name)}


READERS = {
    "itself": [],
    "a view": [(aten.t.default,), (aten.slice.Tensor, 0, 0, 1)],
    "a view that its schema keeps silent about": [(aten._unsafe_view.default, [3, 2])],
    "what may be a view": [(aten.reshape.default, [6])],
    "one of several views": [(aten.split.Tensor, 1), (operator.getitem, 1)],
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", READERS.values(), ids=READERS)
def test_it_waits_for_the_last_reader(way):
    drawing, x, w, _ = drawn()
    shown = w
    for target, *constants in way:
        shown = drawing.op(target, shown, *constants)
    new = drawing.op(aten.add.Tensor, w, x)
    last = drawing.op(aten.exp.default, shown)
    drawing.op(aten.neg.default, last)
    plan = planned(drawing, new, last)
    assert plan.in_place == {1: InPlace("model_w", new.name, last.name)}
    with pytest.raises(PlanError, match=f"exp_default reads .*, whose memory {new.name} has overwritten"):
        check_plan(replace(plan, in_place={1: InPlace("model_w", new.name, new.name)}))


@pytest.mark.every_case
@pytest.mark.parametrize("way", READERS.values(), ids=READERS)
def test_it_stays_apart_if_the_old_value_is_returned(way):
    drawing, x, w, _ = drawn()
    shown = drawing.op(aten.detach.default, w)
    for target, *constants in way:
        shown = drawing.op(target, shown, *constants)
    new = drawing.op(aten.add.Tensor, w, x)
    plan = planned(drawing, new, shown)
    assert plan.in_place == {}
    spoiled = replace(plan, in_place={1: InPlace("model_w", new.name, new.name)})
    with pytest.raises(PlanError, match=r"the caller reads .*, whose memory add_tensor has overwritten"):
        check_plan(spoiled)


def test_to_make_a_view_that_nothing_reads_is_no_read():
    drawing, x, w, _ = drawn()
    new = drawing.op(aten.add.Tensor, w, x)
    drawing.op(aten.t.default, w)
    assert planned(drawing, new).in_place[0].early == new.name


def test_new_state_that_is_another_result_too_stays_apart():
    drawing, x, w, _ = drawn()
    new = drawing.op(aten.add.Tensor, w, x)
    plan = planned(drawing, new, drawing.op(aten.t.default, new))
    assert plan.in_place == {}
    with pytest.raises(PlanError, match="output 1 is written in place, and output 0 shares its memory"):
        check_plan(replace(plan, in_place={1: InPlace("model_w", new.name, new.name)}))


def test_state_that_becomes_a_view_of_other_state_keeps_that_one_apart():
    drawing, x, w, v = drawn()
    shown = drawing.op(aten.detach.default, v)
    new = drawing.op(aten.add.Tensor, w, x)
    program = drawing.finish([(shown, Role.STATE, W), (new, Role.STATE, "model.v")])
    plan = make_plan(program)
    check_plan(plan)
    assert plan.in_place == {0: InPlace("model_w", shown.name, new.name)}
    spoiled = {**plan.in_place, 1: InPlace("model_v", new.name, new.name)}
    with pytest.raises(
        PlanError, match="the caller reads detach_default, whose memory add_tensor has overwritten"
    ):
        check_plan(replace(plan, in_place=spoiled))


def test_an_argument_is_not_written_in_place():
    drawing, x, w, _ = drawn()
    new = drawing.op(aten.add.Tensor, w, x)
    plan = make_plan(drawing.finish([(new, Role.STATE, "x")]))
    assert plan.in_place == {}
    with pytest.raises(PlanError, match="output 0, x, is no new value of x"):
        check_plan(replace(plan, in_place={0: InPlace("x", new.name, new.name)}))


def test_new_state_is_not_written_into_other_state():
    drawing, x, w, _ = drawn()
    new = drawing.op(aten.add.Tensor, w, x)
    plan = planned(drawing, new)
    with pytest.raises(PlanError, match=r"output 0, model\.w, is no new value of model_v"):
        check_plan(replace(plan, in_place={0: InPlace("model_v", new.name, new.name)}))


def test_what_is_laid_out_otherwise_stays_apart():
    drawing, x, w, _ = drawn()
    columns = drawing.op(aten.t.default, w)
    product = drawing.op(aten.mm.default, columns, drawing.op(aten.mm.default, x, columns))
    new = drawing.op(aten.t.default, product)
    plan = planned(drawing, new)
    assert plan.in_place == {}
    with pytest.raises(PlanError, match="output 0 does not fit into model_w"):
        check_plan(replace(plan, in_place={0: InPlace("model_w", new.name, new.name)}))


def test_state_whose_elements_lie_in_one_place_stays_apart():
    drawing, x, _, _ = drawn()
    drawing.input("model.row", Role.BUFFER, torch.ones(1, 3).expand(2, 3))
    new = drawing.op(
        aten.expand.default, drawing.op(aten.slice.Tensor, drawing.op(aten.exp.default, x), 0, 0, 1), [2, 3]
    )
    plan = make_plan(drawing.finish([(new, Role.STATE, "model.row")]))
    check_plan(plan)
    assert plan.in_place == {}
    with pytest.raises(PlanError, match="output 0 does not fit into model_row"):
        check_plan(replace(plan, in_place={0: InPlace("model_row", new.name, new.name)}))


def test_a_write_behind_a_node_that_is_not_there_is_found():
    drawing, x, w, _ = drawn()
    new = drawing.op(aten.add.Tensor, w, x)
    plan = planned(drawing, new)
    with pytest.raises(PlanError, match="after lost, which never runs"):
        check_plan(replace(plan, in_place={0: InPlace("model_w", new.name, "lost")}))


class Accumulating(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.add_optimizer(torch.optim.Adam(self.model.parameters()))
        self.config.set_gradient_accumulation_steps(3)

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def test_state_that_parts_make_is_written_when_the_last_part_has_run():
    step = Accumulating()
    step.compile(mg.spec((6, 4)), mg.spec((6, 3)))
    plan = make_plan(step.builds[0].program)
    check_plan(plan)
    assert len(plan.in_place) == len(plan.program.updates())
    assert all(part.in_place == {} for part in plan.parts)
    order = [node.name for node in plan.program.graph.nodes]
    inputs = {place.input: place for place in plan.in_place.values()}
    # the micro-batches before the last one give the buffers new values, and each reads the weights
    assert inputs["model_1_running_mean"].early == inputs["model_1_running_mean"].made
    assert order.index(inputs["model_0_weight"].early) > order.index("updated")
