"""Each mistake with optimizers gives its named error, and the user's own exceptions come out as they are."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional

import monograph as mg
from tests.graph.error_checks import check, forward, sgd, trained
from tests.support import assert_same
from tests.support.steps import graph, line_of, linear

# --- optimizers ---------------------------------------------------------------------------------------------


def test_backward_without_an_optimizer():
    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()  # at: nobody uses it
        return loss

    step = graph(build, model=linear())
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "backward()", "add_optimizer", "keep_gradients", at="nobody uses it")


def test_an_optimizer_without_backward():
    step = graph(forward, model=(model := linear()))
    step.add_optimizer(sgd(model))
    before = model.weight.clone()
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", "SGD", "loss.backward()")
    assert_same(before, model.weight)


def test_a_manual_optimizer_that_is_never_stepped():
    step = graph(trained, model=(model := linear()))
    step.add_optimizer(sgd(model), manual=True)
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", "manual=True", "optimizer.step()")


@pytest.mark.parametrize(
    ("stray", "told"), [(nn.Parameter(torch.ones(7)), "(7,)"), (nn.LazyLinear(7).weight, "a lazy parameter")]
)
def test_a_parameter_that_no_module_holds(stray, told):
    step = graph(trained, model=(model := linear()))
    step.add_optimizer(torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", told, "group 0, position 2", "self.model = model")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(torch.optim.SGD([stray], lr=0.1))  # at: stray
    check(caught.value, told, "optimizer.0", at="stray")


CHANGED_GROUPS = {
    "another": (
        lambda optimizer, other: optimizer.add_param_group({"params": [other.weight]}),
        "from 1 to 2",
    ),
    "none": (lambda optimizer, other: optimizer.param_groups.clear(), "from 1 to 0"),
    "an option": (lambda optimizer, other: optimizer.param_groups[0].update(amsgrad=True), "max_exp_avg_sq"),
}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", CHANGED_GROUPS)
def test_param_groups_that_build_changes(name, manual):
    change, told = CHANGED_GROUPS[name]

    def build(self, x):
        change(optimizer, self.other)
        loss = trained(self, x)
        if manual:
            optimizer.step()
        return loss

    step = graph(build, model=(model := linear()), other=linear(1))
    optimizer = torch.optim.Adam(model.parameters())
    step.add_optimizer(optimizer, manual=manual)
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "build()", "optimizer.0", "Adam", told)
    assert len(optimizer.param_groups) == 1
    assert not optimizer.param_groups[0]["amsgrad"]


@pytest.mark.parametrize("model", [linear(), nn.LazyLinear(3)], ids=["linear", "lazy"])
def test_a_parameter_in_two_optimizers(model):
    step = graph(trained, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(torch.optim.Adam([model.bias]))  # at: twice
    check(caught.value, "model.bias", "optimizer.0", at="twice")
    step(torch.ones(2, 4))


def test_a_parameter_added_to_two_optimizers_later():
    model, other = linear(), linear(1)
    step = graph(lambda self, x: trained(self, x) + 0 * self.other(x).sum(), model=model, other=other)

    def build(self, x):
        loss = (self.model(x) + self.other(x)).sum()
        loss.backward()
        return loss

    step = graph(build, model=model, other=other)
    first, second = sgd(model), sgd(other)
    step.add_optimizer(first)
    step.add_optimizer(second)
    step(torch.ones(2, 4))
    second.add_param_group({"params": [model.bias]})
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "model.bias", "optimizer.0")


def test_the_same_optimizer_twice():
    model = linear()
    step = graph(trained, model=model)
    optimizer = sgd(model)
    step.add_optimizer(optimizer)
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer)
    check(caught.value, "model.weight")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), ["LBFGS", "closure"]),
        (lambda model: torch.optim.SparseAdam(model.parameters()), ["SparseAdam", "sparse"]),
        (
            lambda model: torch.optim.Adam(model.parameters(), differentiable=True),
            ["differentiable=True"],
        ),
        (lambda model: model, ["torch.optim.Optimizer", "Linear"]),
        (lambda model: None, ["torch.optim.Optimizer", "NoneType"]),
    ],
)
def test_an_optimizer_that_cannot_be_captured(make, parts):
    step = graph(trained, model=(model := linear()))
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(make(model))  # at: refused optimizer
    check(caught.value, *parts, at="refused optimizer")
    assert not step.training


def test_schedulers_that_cannot_be_stepped_by_the_graph():
    step = graph(trained, model=(model := linear()))
    optimizer, other = sgd(model), sgd(linear())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=plateau)  # at: plateau
    check(caught.value, "ReduceLROnPlateau", "scheduler.step(metric)", at="plateau")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(other, 1))
    check(caught.value, "another optimizer")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=0.1)
    check(caught.value, "lr_sch", "float")
    step.add_optimizer(optimizer)
    step(torch.ones(2, 4))


# --- the user's own exceptions ------------------------------------------------------------------------------


class Own(Exception):
    """An exception of the user's own."""


class Raising(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.every_case
@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        Own("mine"),
        KeyError("mine"),
        RuntimeError("mine"),
        NotImplementedError("mine: Metadata"),
        AttributeError("mine"),
        AssertionError("mine"),
        StopIteration("mine"),
        KeyboardInterrupt("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_the_user_pass_through(error):
    step = graph(forward, model=Raising(error))
    with pytest.raises(type(error), match="mine") as caught:
        step(torch.ones(2, 4))
    assert caught.value is error
    assert not step.builds


def test_an_exception_raised_in_a_library_that_the_user_calls():
    def build(self, x):
        return x * int("three")

    with pytest.raises(ValueError, match="invalid literal"):
        graph(build)(torch.ones(2))

    def parse(self, x):
        return x * inspect.signature(3)  # raised inside the standard library

    with pytest.raises(TypeError, match="callable"):
        graph(parse)(torch.ones(2))


def test_an_exception_in_a_backward_hook_passes_through():
    model = linear()

    def hook(_gradient: torch.Tensor) -> None:
        raise Own("in the hook")

    handle = model.weight.register_hook(hook)
    step = graph(trained, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(Own, match="in the hook"):
        step(torch.ones(2, 4))
    handle.remove()
    step(torch.ones(2, 4))


def test_an_error_of_torch_names_the_line():
    def build(self, x):
        y = x + 1
        return functional.linear(y, torch.ones(3, 9))  # at: torch error

    with pytest.raises(mg.CaptureError) as caught:
        graph(build)(torch.ones(2, 4))
    assert caught.value.where.line == line_of("torch error", __file__)
    assert "RuntimeError" in str(caught.value)
    assert isinstance(caught.value.cause, RuntimeError)


@pytest.mark.parametrize("held", [True, False])
def test_a_batch_is_taken_before_the_call(held):
    batches = torch.utils.data.DataLoader(torch.ones(8, 4), 2, shuffle=True)

    def build(self):
        return next(self.batches if held else iter(batches)).sum()  # at: next batch

    step = graph(build)
    step.batches = iter(batches)
    with pytest.raises(mg.DataDependentError, match="build\\(\\) takes a batch of a data loader") as caught:
        step()
    assert caught.value.where.line == line_of("next batch", __file__)
    assert "step(x, y)" in caught.value.hint


def test_an_error_at_run_time_names_the_line():
    def build(self, x):
        y = x + 1
        return functional.embedding(y, torch.ones(3, 2))  # at: run time

    step = graph(build)
    step(torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="out of range") as caught:
        step(torch.tensor([5, 5]))
    assert f"line {line_of('run time', __file__)}" in "\n".join(caught.value.__notes__)
    assert len(step.builds) == 1


def test_a_graph_without_a_class_names_the_line_of_the_call():
    model = nn.Linear(2, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.MonographError) as caught:
        step(torch.randn(3, 5), torch.randn(3, 2))
    assert caught.value.where.file == __file__
