"""Random plans are run for real: right ones are accepted, and what is accepted is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from monograph.errors import PlanError
from monograph.ir.meta import output_nodes
from monograph.plan import alias
from monograph.plan.check import check_plan
from monograph.plan.in_place import InPlace
from monograph.plan.plan import Plan, make_plan
from tests.plan.drawn import SOMETIMES_VIEWS, Enacted, enact, expected, fresh_inputs, programs
from tests.support import assert_same


def assert_right(plan: Plan, *, early: bool = True) -> Enacted:
    """A real run gives the results and the state of one that writes nothing."""
    wanted = expected(plan.program, fresh_inputs(plan.program))
    got = enact(plan, fresh_inputs(plan.program), early=early)
    assert_same(wanted.results, got.results)
    assert_same(wanted.state, got.state)
    return got


@given(programs(), st.booleans())
def test_plans_are_accepted_and_run(program, early):
    plan = make_plan(program)
    check_plan(plan)
    assert_right(plan, early=early)


@given(programs())
def test_bytes_are_those_of_a_run(program):
    plan = make_plan(program)
    held = assert_right(plan).held
    planned = [(moment.running_bytes, moment.left_bytes) for moment in plan.memory.timeline]
    if any(node.target in SOMETIMES_VIEWS for node in program.graph.nodes):  # counted as new memory
        assert all(
            real <= counted
            for pair in zip(held, planned, strict=True)
            for real, counted in zip(*pair, strict=True)
        )
    else:
        assert held == planned
        assert plan.memory.peak_bytes == max(running for running, _ in held)
        assert sum(holder.nbytes for holder in plan.memory.holders) == plan.memory.peak_bytes


@st.composite
def places(draw: st.DrawFn, program) -> Mapping[int, InPlace]:
    """Any outputs written into the inputs of their paths at any moment, often at the end."""
    names = [node.name for node in program.graph.nodes if node.op != "output"]
    moments = st.just(names[-1]) | st.sampled_from(names)
    inputs = {port.path: port.name for port in program.inputs}
    outputs = output_nodes(program.graph)
    chosen = draw(st.sets(st.sampled_from(program.updates()), min_size=1))
    return {
        index: InPlace(inputs[port.path], outputs[index].name, draw(moments))
        for index, port in sorted(chosen, key=lambda item: item[0])
    }


@given(programs(), st.data())
def test_what_is_accepted_is_right(program, data):
    plan = replace(make_plan(program), in_place=data.draw(places(program)))
    try:
        check_plan(plan)
    except PlanError:
        return
    assert_right(plan)
    assert_right(plan, early=False)


@given(programs(), st.data())
def test_a_free_that_comes_earlier_is_refused(program, data):
    plan = make_plan(program)
    order = [node.name for node in program.graph.nodes if node.op == "call_function"]
    freed = [(name, after) for after, names in plan.frees.items() for name in names if order.index(after)]
    assume(freed)
    name, after = data.draw(st.sampled_from(freed))
    before = order[order.index(after) - 1]
    spoiled = {key: tuple(item for item in names if item != name) for key, names in plan.frees.items()}
    spoiled[before] = (*spoiled.get(before, ()), name)
    with pytest.raises(PlanError, match=r"which is not there|but it is not there"):
        check_plan(replace(plan, frees=spoiled))


@given(programs(), st.data())
def test_a_second_free_is_refused(program, data):
    plan = make_plan(program)
    assume(plan.frees)
    name = data.draw(st.sampled_from([name for names in plan.frees.values() for name in names]))
    later = [node.name for node in program.graph.nodes if node.op == "call_function"][-1]
    spoiled = {**plan.frees, later: (*plan.frees.get(later, ()), name)}
    with pytest.raises(PlanError, match="but it is not there"):
        check_plan(replace(plan, frees=spoiled))


@given(programs(), st.data())
def test_a_write_that_comes_earlier_is_refused(program, data):
    plan = make_plan(program)
    assume(plan.in_place)
    index = data.draw(st.sampled_from(sorted(plan.in_place)))
    place = plan.in_place[index]
    order = [node.name for node in program.graph.nodes]
    early = data.draw(st.sampled_from(order[: order.index(place.early)]))
    with pytest.raises(PlanError, match=r"which is not there|has overwritten"):
        check_plan(replace(plan, in_place={**plan.in_place, index: replace(place, early=early)}))


@given(programs(), st.integers(1, 100))
def test_a_peak_that_is_too_low_is_refused(program, by):
    plan = make_plan(program)
    spoiled = replace(plan.memory, peak_bytes=plan.memory.peak_bytes - by)
    with pytest.raises(PlanError, match="are held at once"):
        check_plan(replace(plan, memory=spoiled))


@given(programs(), st.data())
def test_a_plan_that_overlooks_a_view_is_accepted_only_if_it_is_right(program, data):
    views = [
        node
        for node in program.graph.nodes
        if str(node.target).startswith(("aten.t.", "aten.detach", "aten.s", "aten.u"))
    ]
    assume(views)
    overlooked = data.draw(st.sampled_from(views)).target
    with pytest.MonkeyPatch.context() as patch:
        known = alias.shown_values
        patch.setattr(alias, "shown_values", lambda node: ([],) if node.target is overlooked else known(node))
        plan = make_plan(program)
    try:
        check_plan(plan)
    except PlanError:
        return
    assert_right(plan)
    assert_right(plan, early=False)
