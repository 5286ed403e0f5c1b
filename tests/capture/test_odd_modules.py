"""Modules in odd places: tied, hooked, checkpointed, parametrized, compiled. Handled bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monograph as mg
from tests.capture.traps import Plain, compare, inputs, train
from tests.support import assert_same
from tests.support.steps import detached, graph, linear, sgd


def test_tied_weights_and_one_module_used_twice():
    def make() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["b"].weight = model["a"].weight
        return model

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model["b"](self.model["a"](self.model["a"](x)).tanh()).square().mean()
        loss.backward()
        return loss

    compare(build, make)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_dropout(reentrant):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.model, x.requires_grad_(), use_reentrant=reentrant)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(3, 3)))


def test_a_module_wrapped_by_compile():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return train(self, x)

    def make() -> nn.Module:
        return nn.Sequential(torch.compile(linear(), backend="eager"), nn.ReLU())

    compare(build, make)


def test_module_hooks_are_captured():
    def make() -> nn.Module:
        model = nn.Sequential(linear(), nn.ReLU())
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    compare(train, make)


def test_a_module_may_be_sent_where_it_is():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        model = self.model.to(x.device).to(x.dtype).float()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    compare(build)


class HookedInForward(nn.Module):
    """Registers a hook in its first call, and remembers that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hooked = linear(), False

    def forward(self, x):
        if not self.hooked:
            self.layer.register_forward_hook(lambda module, args, out: out * 2)
            self.hooked = True
        return self.layer(x)


def test_a_hook_that_build_leaves_on_a_module_stays():
    compare(train, make=HookedInForward, builds=2, look=lambda model: len(model.layer._forward_hooks))


def test_a_compile_registers_no_hook():
    step = mg.train_graph(model := HookedInForward(), nn.MSELoss(), sgd(model))
    step.compile(torch.randn(3, 4), torch.randn(3, 3))
    assert not model.hooked
    assert not model.layer._forward_hooks
    step(torch.randn(3, 4), torch.randn(3, 3))
    assert model.hooked
    assert len(model.layer._forward_hooks) == 1


def test_a_hook_that_is_registered_in_each_step_is_one_more_each_time():
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            self.layer.register_forward_hook(lambda module, args, out: out * 0.5)
            return self.layer(x)

    compare(train, make=Doubling, builds=3, look=lambda model: len(model.layer._forward_hooks))


def test_a_hook_whose_handle_is_kept_is_refused():
    class Kept(HookedInForward):
        def forward(self, x):
            self.handle = self.layer.register_forward_hook(lambda module, args, out: out * 2)
            return self.layer(x)

    step = mg.train_graph(model := Kept(), nn.MSELoss(), sgd(model))
    with pytest.raises(mg.HookError, match=r"registers or removes a hook of model\.layer") as caught:
        step(torch.randn(3, 4), torch.randn(3, 3))
    assert "called once eagerly" in str(caught.value)
    assert not model.layer._forward_hooks


def test_a_hook_that_holds_a_tensor_of_the_step_is_refused():
    class Holding(HookedInForward):
        def forward(self, x):
            self.layer.register_forward_hook(lambda module, args, out: out + x.sum())
            return self.layer(x)

    step = mg.train_graph(model := Holding(), nn.MSELoss(), sgd(model))
    with pytest.raises(mg.HookError, match=r"registers or removes a hook of model\.layer"):
        step(torch.randn(3, 4), torch.randn(3, 3))


def test_a_hook_that_the_first_eager_call_left_is_captured():
    def make() -> nn.Module:
        model = HookedInForward()
        model(torch.zeros(1, 4))
        return model

    compare(train, make)


def test_a_hook_that_is_removed_before_the_step_ends_is_captured():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        with self.model.register_forward_hook(lambda module, args, out: out * 2):
            loss = self.model(x).square().mean()
        loss.backward()
        return loss

    compare(build, linear)


def test_parametrizations():
    compare(train, lambda: nn.utils.parametrizations.weight_norm(linear()))


def test_spectral_norm_moves_its_vectors():
    compare(train, lambda: nn.utils.parametrizations.spectral_norm(linear()))


@pytest.mark.one_case
@pytest.mark.parametrize("make", [lambda: nn.GRUCell(8, 8), lambda: nn.GRU(8, 8)], ids=["cell", "layer"])
def test_a_gru_changes_chunks_in_place(make):
    """Their rows lie apart in memory, where torch works without vectors, which round otherwise."""

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        loss = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
        loss.backward()
        return loss

    compare(build, make, calls=lambda: inputs(3, 40, 8))


def test_a_change_of_a_slice_keeps_its_layout():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        whole = self.model(x)
        part = whole[:, :8]
        part.mul_(2.0).sigmoid_()
        loss = part.tanh().sum() + whole.sum()
        loss.backward()
        return loss

    compare(build, lambda: nn.Linear(8, 24), calls=lambda: inputs(3, 40, 8))


def test_cpu_lstm():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x)[0].square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.LSTM(4, 3), calls=lambda: inputs(3, 5, 2, 4))


def test_autograd_functions_of_the_user():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 3 + x * 0

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = Double.apply(self.model(x)).square().mean()
        loss.backward()
        return loss

    compare(build)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.device("cpu"),
        lambda: torch.profiler.record_function("step"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_contexts_around_the_first_call_stay_outside(around):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return train(self, x)

    model, other = linear(), linear()
    step, plain = graph(build, model=model), Plain(build, sgd(other))
    step.add_optimizer(sgd(model))
    plain.model = other
    first, second = inputs(2, 5, 4)
    with around():
        assert_same(detached(plain(first)), detached(step(first)))
    assert_same(detached(plain(second)), detached(step(second)))
    assert not torch.is_anomaly_enabled()


def test_modules_set_to_eval_and_back_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            target = self.model(x)
        self.model.train()
        loss = (self.model(x) - target).square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.Sequential(linear(), nn.BatchNorm1d(3), nn.Dropout(0.5)))


def test_a_scheduler_made_after_the_first_call_needs_no_build():
    model = linear()
    optimizer = sgd(model)
    step = graph(train, model=model)
    step.add_optimizer(optimizer)
    step(torch.ones(2, 4))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    step(torch.ones(2, 4))
    scheduler.step()
    step(torch.ones(2, 4))
    assert len(step.builds) == 1


def test_schedulers_do_not_warn():
    model = linear()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = graph(train, model=model)
    step.add_optimizer(optimizer, lr_sch=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(torch.ones(2, 4))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_optimizer_state_of_eager_steps_is_taken_over():
    trails = []
    for kind in (Plain, graph):
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        plain = Plain(train, optimizer)
        plain.model = model
        plain(inputs(1, 5, 4)[0])
        step: Any = plain
        if kind is graph:
            step = graph(train, model=model)
            step.add_optimizer(optimizer)
        trail = [detached(step(x)) for x in inputs(3, 5, 4)]
        plain(inputs(1, 5, 4)[0])
        trails.append([trail, detached(list(model.parameters()))])
    assert_same(*trails)
