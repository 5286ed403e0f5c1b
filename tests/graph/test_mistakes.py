"""What users most likely do not mean is told once, and what they may well mean is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

import monograph as mg
from tests.support.steps import sgd


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.body(x)))


class Plain(nn.Module):
    """Nothing in it asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Train(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


class Evaluate(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


X = torch.ones(3, 4)


@contextmanager
def told(*parts: str) -> Iterator[None]:
    """One warning for each of `parts`, in order, at a line of this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(item.message) for item in found]
    assert len(texts) == len(parts), texts
    for item, part in zip(found, parts, strict=True):
        assert part in str(item.message)
        assert item.filename == __file__


# --- validation that trains -----------------------------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Model, Plain])
def test_validation_through_a_training_graph_is_told(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    step = Train(model, sgd(model))
    step(X)
    with told("in eval() mode, before that in train() mode"):
        for _ in range(3):
            model.eval()
            step(X)
            model.train()
            step(X)


FRAMEWORK = "/usr/lib/python3/site-packages/framework.py"


def framework(code: str) -> dict[str, Any]:
    """What code of an installed package defines."""
    made: dict[str, Any] = {}
    exec(compile(code, FRAMEWORK, "exec"), made)
    return made


def test_the_line_told_is_where_a_framework_was_called() -> None:
    fit = framework("def fit(step, model, x):\n    step(x)\n    model.eval()\n    step(x)\n")["fit"]
    model = Model()
    with told("in eval() mode, before that in train() mode"):
        fit(Train(model, sgd(model)), model, X)


def test_an_error_names_the_line_that_called_a_framework_or_that_of_a_package_in_the_step() -> None:
    fail = framework("def fail(kind):\n    raise kind('no')\n")["fail"]
    with pytest.raises(mg.SignatureError) as refused:
        fail(mg.SignatureError)
    with pytest.raises(mg.CaptureError) as told:
        fail(mg.CaptureError)
    assert (refused.value.where.file, told.value.where.file) == (__file__, FRAMEWORK)


def test_validation_before_the_training_is_told() -> None:
    model = Model().eval()
    step = Train(model, sgd(model))
    step(X)
    model.train()
    with told("in train() mode, before that in eval() mode"):
        step(X)


def test_other_evaluation_is_not_told() -> None:
    model = Model()
    step, evaluate = Train(model, sgd(model)), Evaluate(model)
    with told():
        for _ in range(2):
            model.train()
            step(X)
            model.eval()
            evaluate(X)
            with torch.no_grad():
                model(X)


def test_training_in_eval_mode_throughout_is_not_told() -> None:
    model = Model().eval()
    step = Train(model, sgd(model))
    with told():
        step(X)
        step(X)


def test_frozen_layers_are_not_told() -> None:
    model = Model()
    step = Train(model, sgd(model))
    with told():
        step(X)
        model.body.eval()
        model.body.requires_grad_(False)
        step(X)
        model.eval()
        model.head.train()
        step(X)


def test_a_model_that_another_graph_trains_may_be_in_eval_mode() -> None:
    class Both(mg.Graph):
        def __init__(self, trained: nn.Module, fixed: nn.Module) -> None:
            super().__init__()
            self.trained, self.fixed = trained, fixed
            self.add_optimizer(sgd(trained))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.trained(x) - self.fixed(x)).square().mean()
            loss.backward()
            return loss

    trained, fixed = Model(), Model()
    step = Both(trained, fixed)
    with told():
        step(X)
        fixed.eval()
        step(X)


# --- schedulers that are stepped twice --------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)], o),
}


def test_the_name_by_which_a_scheduler_was_given_is_told() -> None:
    model = Plain()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = mg.train_graph(model, nn.MSELoss(), optimizer, lr_scheduler=scheduler)
    with told("leave out scheduler.step(), or do not pass lr_scheduler"):
        for _ in range(3):
            step(X, torch.zeros(len(X), 2))
            scheduler.step()


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_is_stepped_twice_is_told(make: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    step = Train(model, optimizer, scheduler)
    with told("leave out scheduler.step()"):
        for _ in range(4):
            step(X)
            scheduler.step()


class StepsScheduler(mg.Graph):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = Model()
        self.scheduler = make(self.add_optimizer(sgd(self.model)))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([loss] if plateau else []))
        return loss


@pytest.mark.parametrize(
    "make", [*SCHEDULERS.values(), lr_scheduler.ReduceLROnPlateau], ids=[*SCHEDULERS, "plateau"]
)
def test_a_scheduler_that_build_steps_before_the_update_is_refused(make: Callable[[Any], Any]) -> None:
    step = StepsScheduler(make)
    before = copy.deepcopy((step.scheduler.state_dict(), step.scheduler.optimizer.state_dict()))
    with pytest.raises(mg.OptimizerError, match="which the graph steps after build") as caught:
        step(X)
    assert "add_optimizer(optimizer, lr_scheduler=scheduler)" in caught.value.hint
    assert before == (step.scheduler.state_dict(), step.scheduler.optimizer.state_dict())
    step.scheduler.optimizer.step()
    step.scheduler.step(*([1.0] if make is lr_scheduler.ReduceLROnPlateau else []))


@pytest.mark.one_case
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_is_stepped_at_the_end_of_epochs_too_is_told(make: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    step = Train(model, optimizer, scheduler)

    def epoch() -> None:
        for _ in range(20):
            step(X)
        scheduler.step()

    with told():
        epoch()
    with told("leave out scheduler.step()"):
        epoch()
        step(X)


def test_a_scheduler_of_steps_that_others_make_at_the_end_of_epochs_is_not_told() -> None:
    model = Model()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = Train(model, optimizer, scheduler)
    with told():
        for _ in range(4):
            for _ in range(20):
                step(X)
            model(X).sum().backward()
            optimizer.step()  # a last batch in eager mode
            optimizer.zero_grad()
            scheduler.step()


@pytest.mark.one_case
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_stepped_by_one_are_not_told(make: Callable[[Any], Any]) -> None:
    model, other = Model(), Model()
    optimizer, own = sgd(model), sgd(other)
    optimizer.step()
    scheduler, own_scheduler = make(optimizer), make(own)
    scheduler.step()  # to where training goes on
    step, again = Train(model, optimizer, scheduler), Train(model, optimizer, scheduler)
    by_hand = Train(other, own)
    with told():
        for _ in range(3):
            step(X)
            again(X)  # two graphs move one scheduler
            step.eager(X)
            model(X).sum().backward()
            optimizer.step()  # an eager step between those of the graph
            scheduler.step()
            by_hand(X)
            own_scheduler.step()


def test_a_state_that_is_loaded_is_not_told() -> None:
    model = Model()
    optimizer = sgd(model)
    step = Train(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9))
    with told():
        step(X)
        step(X)
        state = dict(step.state_dict())
        other = Model()
        other_optimizer = sgd(other)
        again = Train(other, other_optimizer, lr_scheduler.ExponentialLR(other_optimizer, 0.9))
        again(X)
        again.load_state_dict(state)
        again(X)


# --- clipping that comes too late ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "clip",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: clip_grad_norm_(list(model.parameters()), max_norm=1.0, error_if_nonfinite=True),
        lambda model: nn.utils.clip_grad.clip_grad_norm_(model.body.parameters(), 1.0),
    ],
)
def test_clipping_after_the_step_is_told(keep: bool, clip: Callable[[Any], Any]) -> None:
    model = Model()
    step = Train(model, sgd(model))
    step.config.keep_gradients(keep)
    with told("gradients are clipped after"):
        for _ in range(3):
            step(X)
            clip(model)
    assert len(step.builds) == 1


def test_clipping_by_value_after_the_step_is_told() -> None:
    model = Model()
    step = Train(model, sgd(model))
    step.config.keep_gradients()
    with told("gradients are clipped after"):
        for _ in range(3):
            step(X)
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)


def test_other_clipping_is_not_told() -> None:
    model, other = Model(), Model()
    optimizer = sgd(model)
    step, again = Train(model, optimizer), Train(other, sgd(other))
    with told():
        for _ in range(3):
            step(X)
            again(X)
            clip_grad_norm_(model.parameters(), float("inf"))  # asks for the norm
            eager = Model()
            eager(X).sum().backward()
            clip_grad_norm_(eager.parameters(), 1.0)
            step.eager(X)
            model(X).sum().backward()  # an eager step between those of the graph
            clip_grad_norm_(model.parameters(), 1.0)
            clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert len(step.builds) == 1


def test_torch_is_left_as_it_was() -> None:
    module = torch.nn.utils.clip_grad
    before = module._clip_grads_with_norm_, module.clip_grad_value_, torch.nn.utils.clip_grad_value_
    model = Model()
    step = Train(model, sgd(model))
    step(X)
    step(X)
    after = module._clip_grads_with_norm_, module.clip_grad_value_, torch.nn.utils.clip_grad_value_
    assert all(a is b for a, b in zip(before, after, strict=True))


# --- parameters that no optimizer has -----------------------------------------------------------------------------------------


def test_a_head_that_was_replaced_before_is_named() -> None:
    model = Model()
    optimizer = sgd(model)
    model.head = nn.Linear(8, 3)
    step = Train(model, optimizer)
    with pytest.raises(mg.MonographError) as caught:
        step(X)
    assert "parameter of shape (2, 8)" in caught.value.message
    assert "model.head.weight and 1 more can be trained and are in no optimizer" in caught.value.hint
    assert "make the optimizer after that" in caught.value.hint


def test_a_module_that_is_not_held_is_named_as_before() -> None:
    model = Model()
    step = Train(nn.Linear(4, 2).requires_grad_(False), sgd(model))
    with pytest.raises(mg.MonographError) as caught:
        step(X)
    assert caught.value.hint == "set its module as an attribute of the Graph: self.model = model"


def test_a_tensor_in_an_optimizer_has_to_be_a_parameter() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    step = Train(nn.Linear(4, 2), torch.optim.SGD([tensor], lr=0.1))
    with pytest.raises(mg.OptimizerError, match=r"holds a tensor of shape \(2, 3\)") as caught:
        step(X)
    assert "nn.Parameter(tensor.detach())" in caught.value.hint


def test_parts_that_come_later_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    step = Train(model, sgd(model))
    step(X)
    model.append(nn.Linear(4, 2))
    with told("model.1.weight, model.1.bias: "):
        step(X)
        step(X[:2])


def test_parameters_that_are_meant_to_stay_are_not_told() -> None:
    model = Model()
    with told():
        Train(model, sgd(model.head))(X)
        lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        Train(lazy, torch.optim.SGD(lazy[1].parameters(), lr=0.1))(X)
        step = Train(model, sgd(model))
        model.extra = nn.Linear(2, 2).requires_grad_(False)
        step(X)
        added = Train(model, optimizer := sgd(model.head))
        model.late = nn.Linear(2, 2)
        optimizer.add_param_group({"params": list(model.late.parameters())})
        added(X)


def test_an_option_that_is_set_instead_of_called_is_an_error() -> None:
    step = mg.trace(lambda x: x * 2)
    with pytest.raises(mg.DefinitionError, match=r"config\.backend is a method") as caught:
        step.config.backend = "inductor"
    assert "config.backend('inductor')" in str(caught.value)


class Divided(mg.Graph):
    """With two micro-batches; `by` is what build() does with its loss."""

    def __init__(self, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.by = nn.Linear(4, 2), by
        self.add_optimizer(sgd(self.model))
        self.config.set_gradient_accumulation_steps(2)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.by(self.model(x).square().mean())
        loss.backward()
        return loss


@pytest.mark.parametrize("by", [lambda loss: loss / 2, lambda loss: loss * 0.5])
def test_a_loss_that_is_divided_for_micro_batches_is_told(by: Callable[[Any], Any]) -> None:
    with pytest.warns(UserWarning, match=r"divided by 2 before backward\(\), and the graph"):
        Divided(by)(torch.randn(4, 4))


@pytest.mark.parametrize("by", [lambda loss: loss, lambda loss: loss / 3, lambda loss: (loss / 2).exp()])
def test_other_losses_of_micro_batches_are_not_told(by: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Divided(by)(torch.randn(4, 4))


SEVERAL_STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "without state": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "fused": lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
}


@torch.no_grad()
def clamped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("kind", SEVERAL_STEPS)
@pytest.mark.parametrize("is_kept", [True, False])
def test_an_optimizer_that_is_stepped_again_after_the_step(kind: str, is_kept: bool) -> None:
    """Where gradients stay; without them nothing moves. Other changes of parameters are meant."""
    for change in ("step", clamped, loaded, None):
        model = Plain()
        optimizer = SEVERAL_STEPS[kind](model.parameters())
        train = mg.train_graph(model, nn.MSELoss(), optimizer)
        train.config.keep_gradients(is_kept)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                train(torch.ones(8, 4), torch.zeros(8, 2))
                if change == "step":
                    optimizer.step()
                elif callable(change):
                    change(model)
                optimizer.zero_grad()
        found = ["parameters move twice" in str(item.message) for item in told]
        assert found == [True] * (change == "step" and is_kept), change
