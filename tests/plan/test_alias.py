"""Who shares memory with whom, as planned and as probed, against what real tensors do."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.ir.meta import ScalarMeta, TensorMeta, metas, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.plan import evaluate, simulate
from monograph.plan.alias import aliases
from monograph.plan.check import check_plan
from monograph.plan.evaluate import Probe, tensor_arguments
from monograph.plan.plan import make_plan
from tests.plan.drawn import aten, start
from tests.plan.test_memory import adamw, convolutions, language, mlp, momentum


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a value, in order."""
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in tensors(item)]
    return [result] if isinstance(result, torch.Tensor) else []


class Recording(fx.Interpreter):
    """Runs a program and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def real_values(program: Program) -> dict[fx.Node, Any]:
    """Every value of a program in a run on made-up inputs."""
    recording = Recording(program.module)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    recording.run(*map(made_up, nodes))
    return recording.results


def made_up(node: fx.Node) -> Any:
    described = value(node)
    if isinstance(described, TensorMeta):
        return torch.ones(described.shape, dtype=described.dtype).as_strided(
            described.shape, described.stride
        )
    assert isinstance(described, ScalarMeta)
    return 0.5


def program_of(make, optimizer) -> Program:
    torch.manual_seed(0)
    model, x, y = make()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer(model))
    step.compile(x, y)
    return step.builds[0].stages[0].program


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(mlp, adamw), (language, adamw), (convolutions, momentum)],
    ids=lambda f: f.__name__,
)
def test_storages_of_a_step_are_those_of_real_tensors(make, optimizer):
    program = program_of(make, optimizer)
    planned, probe = aliases(program), Probe()
    real = real_values(program)
    known: dict[int, Any] = {}
    for node, result in real.items():
        if node.op == "output":
            continue
        keys = {tensor.untyped_storage()._cdata for tensor in tensors(result)}
        storages = planned.certain[node.name]
        assert len(keys) == len(storages), node.format_node()
        if len(keys) == 1:
            assert known.setdefault(*keys, *storages) == next(iter(storages)), node.format_node()
        assert planned.possible[node.name] == storages
    assert len(set(known.values())) == len(known)
    for node in program.ops():
        if list(metas(value(node))) and not str(node.target).startswith("<built-in"):
            assert probe.sharing(node) == really_shared(node, real), node.format_node()


def really_shared(node: fx.Node, real: dict[fx.Node, Any]) -> tuple[frozenset[int], ...]:
    given = [tensor for item in tensor_arguments(node) for tensor in tensors(real[item])]
    return tuple(
        frozenset(i for i, item in enumerate(given) if same_storage(item, made))
        for made in tensors(real[node])
    )


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def test_an_op_of_unknown_kind_may_show_its_arguments():
    drawing = start()
    x, y, *_ = drawing.made
    unknown = drawing.op(aten.reshape.default, x, [6])
    view = drawing.op(aten.detach.default, unknown)
    new = drawing.op(aten.add.Tensor, x, y)
    planned = aliases(drawing.finish([(view, Role.USER, "result.0"), (new, Role.USER, "result.1")]))
    (own,) = planned.certain[unknown.name]
    assert own.maker == unknown.name
    assert planned.possible[view.name] == {own} | planned.certain["x"]
    assert planned.certain[view.name] == {own}
    assert planned.possible[new.name] == planned.certain[new.name]


def test_an_op_that_cannot_run_without_data_is_judged_by_its_schema(monkeypatch):
    monkeypatch.setattr(Probe, "_known", {})
    drawing = start()
    x, *_ = drawing.made
    condition = drawing.op(aten.gt.Scalar, x, 0.0)
    chosen = drawing.op(aten.masked_select.default, x, condition)
    assert Probe().sharing(chosen) == (frozenset(),)


def test_a_probe_draws_no_random_numbers(monkeypatch):
    monkeypatch.setattr(Probe, "_known", {})
    drawing = start()
    x, *_ = drawing.made
    drawn = drawing.op(aten.bernoulli.p, x, 0.5)
    dropped = drawing.op(aten.native_dropout.default, x, 0.5, True)
    before = torch.get_rng_state()
    assert Probe().sharing(drawn) == (frozenset(),)
    assert Probe().sharing(dropped) == (frozenset(), frozenset())
    assert torch.equal(before, torch.get_rng_state())


def test_each_tensor_of_a_list_is_looked_at_once(monkeypatch):
    asked: list[Any] = []
    key, parts = evaluate.storage_key, simulate.metas
    monkeypatch.setattr(Probe, "_known", {})
    monkeypatch.setattr(evaluate, "storage_key", lambda item: (asked.append(item), key(item))[1])
    monkeypatch.setattr(simulate, "metas", lambda item: (asked.append(item), parts(item))[1])
    drawing = start()
    x, *_ = drawing.made
    rows = [drawing.op(aten.mul.Tensor, x, float(number)) for number in range(60)]
    sums = drawing.op(aten._foreach_add.List, rows, rows[::-1])
    items = [drawing.op(operator.getitem, sums, index) for index in range(60)]
    assert Probe().sharing(sums) == (frozenset(),) * 60
    last = drawing.op(aten.add.Tensor, items[0], items[-1])
    check_plan(make_plan(drawing.finish([(last, Role.USER, "result.0")])))
    assert len(asked) < 600


def test_calls_are_alike_only_if_all_that_decides_what_they_share_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Probe, "_known", {})  # a full one is emptied
    drawing, probe = start(), Probe()
    x, y, *_ = drawing.made
    joined = drawing.op(aten.cat.default, [x, x])
    for _ in range(2):  # found, and remembered
        assert probe.sharing(drawing.op(aten.add.Tensor, x, y)) == (frozenset(),)
        assert probe.sharing(drawing.op(aten.t.default, x)) == (frozenset({0}),)
        assert probe.sharing(drawing.op(aten.t.default, joined)) == (frozenset({0}),)
        assert probe.sharing(drawing.op(aten.where.self, drawing.op(aten.gt.Scalar, x, 0), x, y)) == (
            frozenset(),
        )
        for parts in (1, 2, 4):
            rows = drawing.op(aten.split.Tensor, joined, parts)
            assert probe.sharing(rows) == (frozenset({0}),) * (4 // parts)
    assert len(probe._known) == 6  # t of both has one entry
