"""What a module becomes inside of a graph, and what it stays outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import monograph.flow.nn as nn
from monograph.errors import CaptureError, DefinitionError, OptimizerError
from monograph.flow.nn.graph import GraphModule
from tests.flow.steps import (
    TrainStep,
    batches,
    check_told,
    graph,
    infer,
    loss_of,
    net,
    plain,
    sgd,
    trained,
    weights,
)
from tests.support import assert_same


def test_a_module_is_its_own_kind_inside_and_outside_of_build() -> None:
    seen = []

    def build(self, x):
        seen.append((isinstance(self.model, nn.Sequential), isinstance(self.model[0], nn.Linear)))
        return self.model(x)

    step = graph(build, model=net())
    step(batches(1)[0])
    assert seen == [(True, True)]
    assert isinstance(step.model, nn.Sequential)
    assert isinstance(step.model[0], nn.Linear)


def test_to_gives_the_module_or_the_graphs_view() -> None:
    model = net()
    step = infer(model)
    assert step.model.to(nn.Module) is model
    assert step.model[0].to(nn.Module) is model[0]
    view = step.model[2].to(GraphModule)
    assert view is step.model[2].to(nn.graph.GraphModule)
    assert (view.name, view.name_prefix, view.type, view.module) == ("model.2", "model.", "MODULE", model[2])
    assert (step.model.to(GraphModule).name, step.model.to(GraphModule).name_prefix) == ("model", "")
    assert step.model.to(torch.float64) is step.model
    assert model[0].weight.dtype is torch.float64


def test_the_graphs_view_of_what_only_oneflow_has() -> None:
    view = infer(net()).model.to(GraphModule)
    with pytest.raises(AttributeError) as caught:
        _ = view.scope
    check_told(caught.value, "GraphModule.scope is not here", hint="graph.show()")
    with pytest.raises(AttributeError, match="'GraphModule' object has no attribute 'nothing'"):
        _ = view.nothing


def test_a_block_has_the_modules_own_parameters_and_state() -> None:
    model = net()
    step = infer(model)
    assert [*map(id, step.model.parameters())] == [*map(id, model.parameters())]
    assert list(step.model.modules()) == list(model.modules())  # a block equals its module
    assert [path for path, _ in step.model.named_modules()] == [path for path, _ in model.named_modules()]
    assert [*dict(step.model.named_modules(prefix="at"))] == [*dict(model.named_modules(prefix="at"))]
    assert list(step.model.children()) == [child for _, child in step.model.named_children()] == [*model]
    assert_same(dict(model.state_dict()), dict(step.model.state_dict()))  # tensors, no wrappers
    loaded = {name: tensor + 1 for name, tensor in weights(model).items()}
    step.model.load_state_dict(loaded)
    assert_same(loaded, weights(model))


def test_a_block_takes_new_members() -> None:
    step = infer(net())
    step.model.add_module("3", nn.Linear(2, 1))
    step.model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    step.model.register_buffer("count", torch.zeros(1))
    assert step(batches(1)[0]).shape == (4, 1)
    assert {"3.weight", "extra", "count"} <= set(step.model.state_dict())


def test_methods_and_plain_attributes_come_from_the_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(3, 2), 3.0

        def scaled(self, x):
            return self.layer(x) * self.factor

    model, x = Model(), batches(1)[0]
    step = graph(lambda self, x: self.model.scaled(x), model=model)
    assert_same(model.scaled(x).detach(), step(x).detach())
    assert step.model.factor == 3.0


@pytest.mark.one_case
@pytest.mark.parametrize("nested", [True, False], ids=["in a module", "as attributes"])
def test_containers(nested: bool) -> None:
    def parts() -> dict[str, Any]:
        torch.manual_seed(3)
        return {
            "listed": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
            "named": nn.ModuleDict({"first": nn.Linear(3, 3)}),
            "numbers": nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))]),
            "keyed": nn.ParameterDict({"shift": nn.Parameter(torch.ones(3))}),
            "chain": nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
        }

    def forward(self, x):
        for layer in self.listed:
            x = layer(x)
        for name in self.named:
            x = self.named[name](x)
        x = x * self.numbers[0] + self.numbers[1] + self.keyed["shift"]
        return self.chain[-1](self.chain[0](x)) * len(self.listed)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts().items():
                setattr(self, name, part)

    Holder.forward = forward
    reference, model = Holder(), Holder()

    def build(self, x):
        loss = loss_of(self.model if nested else lambda value: forward(self, value), x)
        loss.backward()
        return loss

    held = {"model": model} if nested else dict(model.named_children())
    step = graph(build, sgd(model, momentum=0.9), **held)
    losses = plain(reference, sgd(reference, momentum=0.9), batches(3))
    assert_same(losses, trained(step, batches(3)))
    assert_same(weights(reference), weights(model))


def test_a_mixin_may_bring_build_or_forward() -> None:
    class Forward:
        def forward(self, x):
            return self.layer(x) * 2

    class Model(Forward, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

    class Build:
        def hold(self, model):
            self.model = model

        def build(self, x):
            return self.model(x) + 1

    class Both(Build, nn.Graph):
        def __init__(self, model) -> None:
            super().__init__()
            self.hold(model)

    model, x = Model(), batches(1)[0]
    assert_same((model.layer(x) * 2 + 1).detach(), Both(model)(x).detach())


@pytest.mark.parametrize("bases", [(nn.Graph, torch.nn.Module), (torch.nn.Linear, nn.Graph)])
def test_a_graph_is_no_module(bases: Any) -> None:
    with pytest.raises(DefinitionError) as caught:
        type("Mixed", bases, {})
    check_told(caught.value, "Mixed is a Graph and an nn.Module", hint="self.model = model")


def test_tied_parameters_are_updated_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
            self.out.weight = self.into.weight
            self.again = self.into
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.again(self.out(self.into(x)).tanh()))

    reference, model = Tied(), Tied()
    plain(reference, sgd(reference, momentum=0.9), batches(3))
    step = TrainStep(model, sgd(model, momentum=0.9))
    trained(step, batches(3))
    assert_same(weights(reference), weights(model))
    assert [key for key in step.state_dict() if key.startswith("model.") and "weight" in key] == [
        "model.into.weight-momentum",
        "model.head.weight-momentum",
    ]


def test_parameters_shared_by_two_graphs() -> None:
    model, x = net(), batches(1)[0]
    train, evaluate = TrainStep(model, sgd(model)), infer(model)
    first = evaluate(x).detach().clone()
    train(x)
    assert_same(model(x).detach(), evaluate(x).detach())
    assert not torch.equal(first, evaluate(x))


def test_a_replaced_forward_is_the_one_that_runs() -> None:
    model, x = nn.Linear(3, 2), batches(1)[0]
    model.forward = lambda value: functional.linear(value, model.weight) * 3
    step = infer(model)
    assert_same((functional.linear(x, model.weight) * 3).detach(), step(x).detach())
    model.forward = lambda value: functional.linear(value, model.weight)
    assert_same(functional.linear(x, model.weight).detach(), step(x).detach())


def test_a_module_that_is_not_an_attribute_runs_but_does_not_train() -> None:
    other, x = net(), batches(1)[0]
    step = graph(lambda self, x: other(x))
    assert_same(other(x).detach(), step(x).detach())
    with torch.no_grad():
        other[2].bias += 1
    assert_same(other(x).detach(), step(x).detach())

    def build(self, x):
        loss = loss_of(other, x)
        loss.backward()
        return loss

    with pytest.raises(OptimizerError) as caught:
        graph(build, sgd(other))(x)
    check_told(caught.value, "shape (4, 3)", "that no module of the graph holds", hint="self.model = model")


def test_tensors_from_outside_are_read_at_each_call() -> None:
    free = torch.ones(2)
    model, x = net(), batches(1)[0]
    step = graph(lambda self, x: self.model(x) * free, model=model)
    assert_same(model(x).detach(), step(x).detach())
    free.fill_(3.0)
    assert_same((model(x) * 3.0).detach(), step(x).detach())
    assert len(step.builds) == 1


def test_graphs_cannot_be_nested() -> None:
    inner = infer(net())
    outer = graph(lambda self, x: inner(x))
    with pytest.raises(CaptureError) as caught:
        outer(batches(1)[0])
    check_told(caught.value, f"{inner.name} is called inside build() of {outer.name}", hint="call the module")
    inner(batches(1)[0])  # alone it works
