"""Sums over processes become few collectives, which begin early and end late, in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from monograph.distributed.programs.collectives import begins_collective, calls_in_order
from monograph.distributed.programs.gather_again import AGAIN
from monograph.ir.meta import add_label, set_origin, set_value, tensor_meta
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.passes import collectives
from monograph.passes.collectives import merge_collectives
from monograph.plan.check import check_plan
from monograph.plan.plan import make_plan
from monograph.user_code.lines import Origin
from tests.support import assert_same

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Steps:
    """Writes a backward whose gradients have these shapes, each averaged right after all are there."""

    def __init__(
        self, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.float32,), processes: int = 2
    ) -> None:
        self.processes = processes
        self.graph, self.ports = fx.Graph(), list[Port]()
        gradients = []
        for index, shape in enumerate(shapes):
            x = self.given(shape, dtypes[index % len(dtypes)])
            gradients.append(self.op(aten.sin.default, x, like=x))
        self.results = [self.mean(gradient) for gradient in gradients]

    def given(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        x = self.graph.placeholder(f"x{len(self.ports)}")
        set_value(x, tensor_meta(torch.empty(shape, dtype=dtype)))
        self.ports.append(Port(x.name, Role.USER, x.name))
        return x

    def op(self, target: Any, *args: Any, like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args)
        set_value(node, like.meta["value"])
        set_origin(node, Origin("model.py", 3, "fc", "backward"))
        return node

    def mean(self, gradient: fx.Node, group: str = "monograph/dp") -> fx.Node:
        share = self.op(aten.mul.Tensor, gradient, 0.5, like=gradient)
        begun = self.op(c10d.all_reduce.default, share, "sum", group, like=gradient)
        return self.op(c10d.wait_tensor.default, begun, like=gradient)

    def update(self, *given: fx.Node) -> fx.Node:
        node = self.op(aten.mul.Tensor, *given, like=given[0])
        set_origin(node, Origin("model.py", 4, "fc", "update"))
        return node

    def updated_in_parts(self, gradient: fx.Node) -> fx.Node:
        """ZeRO 2: each process updates a part."""
        part = tensor_meta(torch.empty(gradient.meta["value"].shape[0] // self.processes))
        share = self.op(aten.mul.Tensor, gradient, 0.5, like=gradient)
        begun = self.op(
            c10d.reduce_scatter_tensor.default, share, "sum", self.processes, "monograph/dp", like=gradient
        )
        done = self.op(c10d.wait_tensor.default, begun, like=gradient)
        for node in (begun, done):
            set_value(node, part)
        begun = self.op(
            c10d.all_gather_into_tensor.default,
            self.update(done, done),
            self.processes,
            "monograph/dp",
            like=gradient,
        )
        set_origin(begun, Origin(phase="update"))
        return self.op(c10d.wait_tensor.default, begun, like=gradient)

    def finish(self) -> Program:
        self.graph.output(tuple(self.results))
        outputs = tuple(Port(f"out{i}", Role.USER, f"result.{i}") for i in range(len(self.results)))
        return Program("step", fx.GraphModule(torch.nn.Module(), self.graph), tuple(self.ports), outputs)


def merged(program: Program) -> Program:
    made = merge_collectives(program)
    verify(made, after="merge_collectives")
    check_plan(make_plan(made))
    return made


def test_sums_of_one_kind_are_one() -> None:
    program = Steps((2, 3), (4,), (), (5, 1)).finish()
    made = merged(program)
    assert len(list(calls_in_order(program))) == 4
    assert len(list(calls_in_order(made))) == 1
    assert merge_collectives(made).text == made.text


def test_sums_of_other_types_or_groups_are_apart() -> None:
    steps = Steps((2, 3), (4,), (3,), dtypes=(torch.float32, torch.bfloat16))
    steps.results.append(steps.mean(steps.results[0], "monograph/tp"))
    made = merged(steps.finish())
    kinds = [(item.meta["value"].dtype, item.args[2]) for item in made.graph.nodes if begins_collective(item)]
    assert sorted(kinds, key=str) == [
        (torch.bfloat16, "monograph/dp"),
        (torch.float32, "monograph/dp"),
        (torch.float32, "monograph/tp"),
    ]


def test_a_sum_of_sums_comes_later() -> None:
    steps = Steps((2, 3), (2, 3))
    steps.results = [steps.mean(steps.op(aten.add.Tensor, *steps.results, like=steps.results[0]))]
    assert len(list(calls_in_order(merged(steps.finish())))) == 2


def test_buckets_begin_when_their_last_gradient_is_there(monkeypatch) -> None:
    monkeypatch.setattr(collectives, "FIRST_BYTES", 48)
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 48)
    made = merged(Steps((6,), (6,), (6,), (6,)).finish())
    order = [str(node.target).split(".")[1] for node in made.graph.nodes if node.op == "call_function"]
    kept = [name for name in order if name in ("sin", "all_reduce", "wait_tensor")]
    assert kept == ["sin"] * 2 + ["all_reduce"] + ["sin"] * 2 + ["all_reduce"] + ["wait_tensor"] * 2


@pytest.mark.parametrize(("inputs", "number"), [(1, 1), (2, 4)])
def test_a_full_bucket_takes_what_is_there_at_the_same_time(monkeypatch, inputs: int, number: int) -> None:
    """Where nothing is computed in between that takes time, a second collective would be no earlier."""
    monkeypatch.setattr(collectives, "FIRST_BYTES", 64)
    steps = Steps((4, 4))
    *_, x = (node for node in steps.graph.nodes if node.target is aten.sin.default)
    for _ in range(3):
        x = steps.op(aten.mm.default if inputs == 2 else aten.cos.default, *[x] * inputs, like=x)
        steps.results.append(steps.mean(x))
    assert len(list(calls_in_order(merged(steps.finish())))) == number


def test_the_numbers_stay(monkeypatch) -> None:
    """In a group of one, all is as it was; the interpreter of torch runs both."""
    program = Steps((2, 3), (4,), (), (5, 1)).finish()
    made = merged(program)
    monkeypatch.setitem(_ALONE, c10d.all_reduce.default, lambda x, *_: x.clone())
    monkeypatch.setitem(_ALONE, c10d.wait_tensor.default, lambda x: x)
    inputs = [torch.randn(2, 3), torch.randn(4), torch.randn(()), torch.randn(5, 1)]
    assert_same(*(list(_Alone(item.module).run(*inputs)) for item in (program, made)))


_ALONE: dict[Any, Any] = {}


class _Alone(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_ALONE.get(target, target), args, kwargs)


def test_a_value_that_two_gathers_send_is_there_before_both() -> None:
    steps = Steps((4,), (4,))
    first, last = steps.results
    both = steps.op(aten.clone.default, first, like=first)
    whole = tensor_meta(torch.empty(8))

    def gathered(value: fx.Node) -> fx.Node:
        begun = steps.op(c10d.all_gather_into_tensor.default, value, 2, "monograph/dp", like=value)
        done = steps.op(c10d.wait_tensor.default, begun, like=value)
        for node in (begun, done):
            set_value(node, whole)
        return steps.op(aten.sin.default, done, like=done)

    steps.results = [gathered(value) for value in (both, last, both)]
    made = merged(steps.finish())
    assert sum(begins_collective(node) for node in made.graph.nodes) == 4  # the sum, and three gathers


def in_parts_and_whole(steps: Steps) -> list[str]:
    *_, x = (node for node in steps.graph.nodes if node.target is aten.sin.default)
    steps.results = [steps.updated_in_parts(x), *(steps.update(item, item) for item in steps.results)]
    made = merged(steps.finish())
    return sorted(str(node.target).split(".")[1] for node in made.graph.nodes if begins_collective(node))


def test_sums_of_small_parameters_go_with_the_parts_of_others() -> None:
    """A sum alone would be waited for at the end of backward, after the scattered one and before what is gathered."""
    assert in_parts_and_whole(Steps((3,), (8,))) == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_sums_of_more_than_two_processes_stay_sums() -> None:
    """Each part would be added in an order of its own, and copies of a parameter would drift apart."""
    found = in_parts_and_whole(Steps((3,), (8,), processes=4))
    assert found == ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]


def test_a_sum_that_is_sent_on_stays_one() -> None:
    steps = Steps((3,), (8,))
    steps.results = [steps.mean(item) for item in steps.results]
    assert in_parts_and_whole(steps).count("all_reduce") > 0


def test_a_sum_of_another_type_stays_one() -> None:
    steps = Steps((3,), (8,), dtypes=(torch.bfloat16, torch.float32))
    assert in_parts_and_whole(steps) == ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]


def gathered(steps: Steps, part: fx.Node, label: str = AGAIN) -> fx.Node:
    begun = steps.op(c10d.all_gather_into_tensor.default, part, 1, "monograph/dp", like=part)
    add_label(begun, label)
    return steps.op(c10d.wait_tensor.default, begun, like=part)


def order_in(steps: Steps) -> list[str]:
    kinds = ("mm", "all_reduce", "all_gather_into_tensor", "broadcast")
    names = (getattr(node.target, "_opname", "") for node in merged(steps.finish()).graph.nodes)
    return [name for name in names if name in kinds]


def products(steps: Steps, x: fx.Node, count: int) -> fx.Node:
    for _ in range(count):
        x = steps.op(aten.mm.default, x, x, like=x)
    return x


@pytest.mark.parametrize("label", [AGAIN, "of another kind"])
def test_the_first_parameters_are_gathered_from_the_start(label: str) -> None:
    """After what has begun there: buffers are needed first. What is no parameter stays where it is."""
    steps = Steps()
    x, part = steps.given((4, 4)), steps.given((4, 4))
    begun = steps.op(c10d.broadcast.default, x, 0, "monograph/dp", like=x)
    y = products(steps, steps.op(c10d.wait_tensor.default, begun, like=x), 2)
    steps.results = [steps.op(aten.mm.default, y, gathered(steps, part, label), like=y)]
    early = ["broadcast", "all_gather_into_tensor", "mm", "mm", "mm"]
    late = ["broadcast", "mm", "mm", "all_gather_into_tensor", "mm"]
    assert order_in(steps) == (early if label == AGAIN else late)


@pytest.mark.parametrize("between", [0, 1])
def test_a_gather_goes_before_a_sum_that_begins_at_about_the_same_time(between: int) -> None:
    steps = Steps()
    x, one, other = (steps.given((4, 4)) for _ in range(3))
    y = products(steps, x, 2)
    total = steps.mean(y)
    z = products(steps, y, between)
    z = steps.op(aten.mm.default, z, gathered(steps, one), like=z)
    z = steps.op(aten.mm.default, z, gathered(steps, other), like=z)
    steps.results = [total, z]
    if between:
        last = ["all_reduce", "mm", "all_gather_into_tensor"]
    else:
        last = ["all_gather_into_tensor", "all_reduce"]
    assert order_in(steps) == ["all_gather_into_tensor", "mm", "mm", *last, "mm", "mm"]
