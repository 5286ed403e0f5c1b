"""What a new user writes wrongly gets a message that names the right thing: names, places of arguments, what was called."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)


class Step(mg.Graph):
    """A step that a test writes: `body(self, x, y)`."""

    def __init__(self, body: Callable[..., Any], *, manual: bool = False, keeps: bool = False) -> None:
        super().__init__()
        self.model, self.loss_fn, self.optim = *parts()[:2], None
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.add_optimizer(optimizer, manual=manual)
        self.held = (optimizer,) if keeps else ()
        self.body = body

    def build(self, x, y, *more):
        return self.body(self, x, y, *more)


def loss_of(step: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = step.loss_fn(step.model(x), y)
    return loss


def told(function: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# --- names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bulid", "forward"])
def test_the_step_under_another_name(name: str) -> None:
    kind = type("Named", (mg.Graph,), {name: lambda self, x: x, "_helper": lambda self: None})
    assert f"rename {name}() to build()" in told(lambda: kind()(X), mg.MissingBuildError)


def test_no_method_may_be_the_step() -> None:
    kind = type("Two", (mg.Graph,), {"left": lambda self: None, "right": lambda self: None})
    assert "write the step there: def build" in told(lambda: kind()(X), mg.MissingBuildError)


def test_attributes_near_a_name() -> None:
    step = mg.train_graph(*parts())
    assert "no attribute 'modle': did you mean 'model'?" in told(lambda: step.modle, AttributeError)
    assert "did you mean 'enable_amp'" in told(lambda: step.config.enable_apm(), AttributeError)
    assert "call of the graph itself" in told(lambda: step.step(X, Y), AttributeError)
    assert "did you mean" not in told(lambda: step.quite_another, AttributeError)
    assert not hasattr(step.config, "modle")
    for copied in (copy.deepcopy(step.config), pickle.loads(pickle.dumps(step.config))):
        assert copied.settings == step.config.settings


# --- train_graph ---------------------------------------------------------------------------------------------------------


def test_arguments_of_train_graph_at_other_places() -> None:
    model, loss_fn, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    order = "train_graph(model, loss_fn, optimizer)"
    wrong: list[tuple[tuple[Any, ...], str, str]] = [
        ((model, optimizer, loss_fn), "loss_fn is of type SGD", order),
        ((model.parameters(), loss_fn, optimizer), "model is of type generator", order),
        ((nn.Linear, loss_fn, optimizer), "model is the class Linear", order),
        ((model, "mse", optimizer), "loss_fn is 'mse'", "cross_entropy"),
        ((model, nn.MSELoss, optimizer), "loss_fn is the class MSELoss", "make one: MSELoss()"),
        ((model, loss_fn, scheduler), "optimizer is of type StepLR", "lr_sch=scheduler"),
        ((model, loss_fn, plateau), "optimizer is of type ReduceLROnPlateau", "lr_sch=scheduler"),
        (
            (model, loss_fn, torch.optim.SGD),
            "optimizer is the class SGD",
            "make one: SGD(model.parameters())",
        ),
        ((model, loss_fn, [optimizer]), "optimizer is of type list", "add_optimizer() for each"),
        ((model, loss_fn, None), "optimizer is None", order),
    ]
    for given, message, hint in wrong:
        said = told(lambda given=given: mg.train_graph(*given), mg.DefinitionError)
        assert message in said
        assert hint in said
        assert f'"{__file__}"' in said


def test_a_scheduler_is_no_optimizer() -> None:
    model, _, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    said = told(lambda: mg.trace(model).add_optimizer(scheduler), mg.OptimizerError)
    assert "a StepLR, which is a scheduler" in said
    assert "add_optimizer(optimizer, lr_sch=scheduler)" in said


# --- optimizers ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_was_added_and_is_an_attribute() -> None:
    step, optimizer = mg.trace(nn.Linear(3, 2)), parts()[2]
    assert "call self.add_optimizer(optimizer) instead" in told(
        lambda: setattr(step, "o", optimizer), mg.DefinitionError
    )
    step.add_optimizer(optimizer)
    said = told(lambda: setattr(step, "o", optimizer), mg.DefinitionError)
    assert "leave the attribute out" in said
    assert "manual=True" in said


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_build_takes_away(to_none: bool) -> None:
    def body(self, x, y):
        loss = loss_of(self, x, y)
        loss.backward()
        if to_none:
            for parameter in self.model.parameters():
                parameter.grad = None
        else:
            self.held[0].zero_grad()
        return loss

    said = told(lambda: Step(body, keeps=True)(X, Y), mg.OptimizerError)
    assert "takes away those that backward() has made" in said
    assert "did not call backward()" not in said
    assert "leave zero_grad() out" in said
    assert "did not call backward()" in told(lambda: Step(loss_of)(X, Y), mg.OptimizerError)


def test_an_optimizer_that_only_some_calls_step() -> None:
    def body(self, x, y, update):
        loss = loss_of(self, x, y)
        loss.backward()
        if update:
            self.held[0].step()
        return loss

    step = Step(body, manual=True, keeps=True)
    step(X, Y, True)
    said = told(lambda: step(X, Y, False), mg.OptimizerError)
    assert "never calls its step() in this call" in said
    assert "graphs over one model may share its optimizers" in said


def test_graphs_over_one_model_share_its_optimizers() -> None:
    class Other(mg.Graph):
        def __init__(self, model, first, last, *, both: bool) -> None:
            super().__init__()
            self.model, self.both = model, both
            self.first = self.add_optimizer(first, manual=True) if both else None
            self.last = self.add_optimizer(last, manual=True)

        def build(self, x):
            return turn(self.model, self.first, self.last, x)

    def turn(model, first, last, x):
        model.zero_grad()
        hidden = model[0](x)
        loss = model[1](hidden if first else hidden.detach()).square().mean()
        loss.backward()
        last.step()
        if first:
            first.step()
        return loss.detach()

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        return model, *(torch.optim.Adam(part.parameters(), lr=0.1) for part in model)

    model, first, last = made()
    expected = [turn(model, first if i % 3 == 2 else None, last, X * i) for i in range(7)]
    copied, first, last = made()
    steps = [Other(copied, first, last, both=both) for both in (False, True)]
    assert torch.equal(torch.stack(expected), torch.stack([steps[i % 3 == 2](X * i) for i in range(7)]))
    assert all(map(torch.equal, model.parameters(), copied.parameters()))


def test_clipping_before_backward() -> None:
    clip = nn.utils.clip_grad_norm_

    def early(self, x, y):
        loss = loss_of(self, x, y)
        clip(self.model.parameters(), 1.0)
        loss.backward()
        return loss

    def late(self, x, y):
        loss = loss_of(self, x, y)
        loss.backward()
        clip(self.model.parameters(), 1.0)
        return loss

    with pytest.warns(UserWarning, match="clips gradients where there are none yet") as warned:
        Step(early)(X, Y)
    assert [item.filename for item in warned if "clips" in str(item.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Step(late)(X, Y)


# --- values and calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda loss: f"{loss:.3f}",
        lambda loss: loss.detach().numpy(),
        lambda loss: 1 if torch.isnan(loss) else 2,  # in torch: a line of the user
        lambda loss: print(loss.item()),
    ],
)
def test_values_read_in_build(read: Callable[[torch.Tensor], Any]) -> None:
    def body(self, x, y):
        loss = loss_of(self, x, y)
        read(loss)
        loss.backward()
        return loss

    with pytest.raises(mg.DataDependentError) as caught:
        Step(body)(X, Y)
    assert caught.value.hint.startswith("return it, and ")
    assert "lambda loss" in caught.value.source or "read(loss)" in caught.value.source


def test_what_looks_at_a_step_is_called_without_a_batch_or_with_sizes() -> None:
    step = mg.trace(lambda x, y: x + y)
    assert "mg.spec((64, 1, 8, 8))" in told(lambda: step.summary((64, 1, 8, 8)), mg.SignatureError)
    said = told(step.profile, mg.SignatureError)
    assert "pass a batch" in said
    assert "[]" not in said


def test_no_grad_at_another_size() -> None:
    step = mg.train_graph(*parts())
    step(X, Y)
    with pytest.raises(mg.CaptureError) as caught, torch.no_grad():
        step(X[:3], Y[:3])
    assert "does not require grad" in caught.value.message
    assert caught.value.hint.startswith("the step is called under torch.no_grad()")
    assert "the graph was built for a tensor (4, 3)" in caught.value.hint
