"""Optimizers, schedulers, clipping, scalers and half precision; the formulas have tests of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import monograph.flow as flow
from monograph.errors import DefinitionError, OptimizerError
from monograph.internals.internals import internals_of
from tests.flow.steps import TrainStep, batches, check_told, graph, loss_of, net, plain, sgd, trained, weights
from tests.support import assert_same


class Lion(torch.optim.Optimizer):
    """Signs of an interpolated momentum (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum, gradient = state["momentum"], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * torch.sign(first * momentum + (1 - first) * gradient))
                momentum.mul_(second).add_(gradient, alpha=1 - second)


# --- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "reference"),
    [
        (
            lambda p: flow.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (lambda p: flow.optim.Adam(p, amsgrad=True), lambda p: torch.optim.Adam(p, amsgrad=True)),
        (lambda p: flow.optim.AdamW(p), lambda p: torch.optim.AdamW(p, weight_decay=0)),
        (lambda p: flow.optim.Adagrad(p), lambda p: torch.optim.Adagrad(p, lr=0.001)),
        (lambda p: flow.optim.Adadelta(p), lambda p: torch.optim.Adadelta(p)),
        (lambda p: Lion(p, weight_decay=0.1), lambda p: Lion(p, weight_decay=0.1)),
        (lambda p: torch.optim.RAdam(p), lambda p: torch.optim.RAdam(p)),
    ],
    ids=["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "one of one's own", "one of torch"],
)
def test_optimizers_train_as_in_the_plain_loop(own: Any, reference: Any) -> None:
    plain_model, model = net(), net()
    losses = plain(plain_model, reference(plain_model.parameters()), batches(4))
    assert_same(losses, trained(TrainStep(model, own(model.parameters())), batches(4)))
    assert_same(weights(plain_model), weights(model))


def test_a_custom_optimizer_goes_on_from_a_state() -> None:
    first, again = (TrainStep(model, Lion(model.parameters())) for model in (net(), net(5)))
    trained(first, batches(2))
    state = first.state_dict()
    assert state["model.0.weight-momentum"].shape == (4, 3)
    again.load_state_dict(state)
    assert_same(trained(first, batches(2)), trained(again, batches(2)))
    assert_same(weights(first.model), weights(again.model))


def test_parameters_need_not_be_contiguous_or_apart() -> None:
    """`contiguous_params` said how OneFlow stores parameters: it is taken, and changes nothing."""
    reference, model = net(), net()
    with torch.no_grad():
        for side in (reference, model):
            side[0].weight = torch.nn.Parameter(side[0].weight.t().contiguous().t())
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, contiguous_params=True)
    assert_same(
        plain(reference, sgd(reference), batches(3)), trained(TrainStep(model, optimizer), batches(3))
    )
    assert_same(weights(reference), weights(model))


def test_lbfgs_is_refused() -> None:
    model = net()
    with pytest.raises(OptimizerError, match="LBFGS") as caught:
        TrainStep(model, torch.optim.LBFGS(model.parameters()))(batches(1)[0])
    assert caught.value.hint


# --- schedulers ---------------------------------------------------------------------------------------------------------

of_flow = flow.optim.lr_scheduler
of_torch = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("own", "reference"),
    [
        (
            lambda o: of_flow.LambdaLR(o, lambda step: 0.9**step),
            lambda o: of_torch.LambdaLR(o, lambda s: 0.9**s),
        ),
        (
            lambda o: of_flow.ChainedScheduler([of_flow.StepLR(o, 2, 0.5), of_flow.StepLR(o, 2, 0.5)]),
            lambda o: of_torch.StepLR(o, 2, 0.5),
        ),
        (
            lambda o: of_flow.MultiplicativeLR(o, lambda step: 0.5),
            lambda o: of_torch.MultiplicativeLR(o, lambda step: 0.5),
        ),
        (
            lambda o: of_torch.OneCycleLR(o, 0.5, total_steps=9),
            lambda o: of_torch.OneCycleLR(o, 0.5, total_steps=9),
        ),
    ],
    ids=["LambdaLR", "ChainedScheduler", "MultiplicativeLR", "one of torch"],
)
def test_schedulers_that_oneflow_refuses(own: Any, reference: Any) -> None:
    plain_model, model = net(), net()
    optimizers = sgd(plain_model), sgd(model)
    step = TrainStep(model, optimizers[1], own(optimizers[1]))
    schedule = reference(optimizers[0])
    if type(internals_of(step).registry.optimizers[0].scheduler).__name__ == "ChainedScheduler":
        rates = [0.1, 0.1, 0.025, 0.025]  # both halve
        expected = []
        for x, rate in zip(batches(4), rates, strict=True):
            optimizers[0].param_groups[0]["lr"] = rate
            expected += plain(plain_model, optimizers[0], [x])
    else:
        expected = plain(plain_model, optimizers[0], batches(4), schedule)
    assert_same(expected, trained(step, batches(4)))
    assert_same(weights(plain_model), weights(model))
    assert len(step.builds) == 1


class Named(flow.nn.Graph):
    """It gives its scheduler by a name."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, **scheduler: Any) -> None:
        super().__init__()
        self.model = model
        self.returned = self.add_optimizer(optimizer, **scheduler)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("name", ["lr_sch", "lr_scheduler"])
def test_a_scheduler_has_either_name_and_add_optimizer_returns_nothing(name: str) -> None:
    model = net()
    optimizer = sgd(model)
    before, scheduler = optimizer.param_groups[0]["lr"], of_flow.StepLR(optimizer, 1, 0.5)
    step = Named(model, optimizer, **{name: scheduler})
    assert step.returned is None
    step(next(iter(batches(1)))[0])
    assert optimizer.param_groups[0]["lr"] == before / 2
    with pytest.raises(OptimizerError, match=f"^{name} belongs to another optimizer"):
        Named(model, sgd(model), **{name: scheduler})
    with pytest.raises(DefinitionError, match="two names of one argument"):
        Named(model, optimizer, lr_sch=scheduler, lr_scheduler=scheduler)


def test_reduce_on_plateau_is_stepped_by_hand() -> None:
    reference, model = net(), net()
    optimizers = sgd(reference), sgd(model)
    schedules = [of_flow.ReduceLROnPlateau(item, factor=0.5, patience=0) for item in optimizers]
    with pytest.raises(OptimizerError) as caught:
        TrainStep(model, optimizers[1], schedules[1])
    check_told(
        caught.value, "ReduceLROnPlateau cannot be lr_sch", hint="call scheduler.step(metric) yourself"
    )
    step = TrainStep(model, optimizers[1])
    for x, metric in zip(batches(4), (1.0, 2.0, 2.0, 0.5), strict=True):
        assert_same(plain(reference, optimizers[0], [x]), trained(step, [x]))
        for schedule in schedules:
            schedule.step(metric)
    assert optimizers[1].param_groups[0]["lr"] == 0.025
    assert_same(weights(reference), weights(model))
    assert len(step.builds) == 1


# --- clipping and rates of a group --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_by_the_keys_of_a_group(order: float) -> None:
    reference, model = net(), net()
    groups = [
        {"params": model[0].parameters(), "clip_grad_max_norm": 0.01, "clip_grad_norm_type": order},
        {"params": model[2].parameters()},
    ]
    step = TrainStep(model, flow.optim.SGD(groups, lr=0.1))
    optimizer = sgd(reference)
    for x in batches(3):
        optimizer.zero_grad()
        loss_of(reference, x).backward()
        torch.nn.utils.clip_grad_norm_(reference[0].parameters(), 0.01, order)
        optimizer.step()
        step(x)
    assert_same(weights(reference), weights(model))


def test_the_norm_of_a_clipped_update() -> None:
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    group = {"params": list(model.parameters()), "clip_grad_max_norm": 0.001, "clip_grad_norm_type": 2.0}
    TrainStep(model, flow.optim.SGD([group], lr=1.0))(batches(1)[0])
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.001, rel=1e-3)


def test_clipping_in_build() -> None:
    def build(self, x):
        loss = loss_of(self.model, x)
        loss.backward()
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)  # OneFlow has no clipping by value
        return loss

    reference, model = net(), net()
    optimizer, step = sgd(reference), graph(build, sgd(model), model=model)
    for x in batches(3):
        optimizer.zero_grad()
        loss_of(reference, x).backward()
        torch.nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        optimizer.step()
        step(x)
    assert_same(weights(reference), weights(model))


def test_the_rate_of_a_group_is_scaled() -> None:
    reference, model = net(), net()

    def groups(side: Any, **scale: float) -> list[dict[str, Any]]:
        return [{"params": side[0].parameters(), **scale}, {"params": side[2].parameters()}]

    optimizer = torch.optim.SGD(groups(reference), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["lr"] = 0.1 * 0.5
    own = flow.optim.SGD(groups(model, lr_scale=0.5), lr=0.1, momentum=0.9)
    assert_same(plain(reference, optimizer, batches(3)), trained(TrainStep(model, own), batches(3)))
    assert_same(weights(reference), weights(model))
    assert own.param_groups[0]["lr"] == 0.1


# --- scalers and half precision -------------------------------------------------------------------------------------------


def test_a_static_scale_of_a_power_of_two_changes_no_bits() -> None:
    reference, model = net(), net()
    step = TrainStep(model, sgd(model))
    step.set_grad_scaler(flow.amp.StaticGradScaler(1024.0))
    assert_same(plain(reference, sgd(reference), batches(3)), trained(step, batches(3)))
    assert_same(weights(reference), weights(model))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf")])
def test_a_static_scale_is_positive(wrong: float) -> None:
    with pytest.raises(DefinitionError) as caught:
        flow.amp.StaticGradScaler(wrong)
    check_told(caught.value, f"StaticGradScaler({wrong})", "positive", hint="a power of two")


def test_the_dynamic_scale_moves_as_in_the_plain_loop() -> None:
    """It grows, it shrinks where gradients are infinite, and the step is skipped then: as torch's own scaler does."""
    reference, model = net(), net()
    options = {"init_scale": 16.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
    scaler, own = torch.amp.GradScaler("cpu", **options), flow.amp.GradScaler(**options)
    optimizer, step = sgd(reference, momentum=0.9), TrainStep(model, sgd(model, momentum=0.9))
    step.set_grad_scaler(own)
    data = batches(6)
    data[3][0, 0] = float("inf")
    scales = []
    for x in data:
        optimizer.zero_grad()
        scaler.scale(loss_of(reference, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        step(x)
        scales.append(own.get_scale())
        assert scaler.get_scale() == scales[-1]
        assert_same(weights(reference), weights(model))
    assert scales == [16.0, 64.0, 64.0, 32.0, 32.0, 128.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_autocast(dtype: torch.dtype) -> None:
    reference, model = net(), net()
    optimizer, step = sgd(reference), TrainStep(model, sgd(model))
    step.config.enable_amp(True, dtype=dtype)
    for x in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(reference, x)
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), step(x).detach())
    assert_same(weights(reference), weights(model))


def test_half_precision_is_float16_unless_told_and_can_be_switched_off() -> None:
    model = net()
    step = graph(lambda self, x: self.model(x), model=model)
    step.config.enable_amp()
    x = batches(1)[0]
    assert step(x).dtype is torch.float16
    step.config.enable_amp(False)
    assert_same(model(x).detach(), step(x).detach())


@pytest.mark.one_case
@pytest.mark.parametrize(
    "switch",
    [
        "allow_fuse_model_update_ops",
        "allow_fuse_add_to_output",
        "allow_fuse_cast_scale",
        "enable_multi_tensor_update",
        "enable_fused_model_update_cast",
        "enable_cudnn_conv_heuristic_search_algo",
    ],
)
def test_switches_of_the_compiler_keep_the_numbers(switch: str) -> None:
    models = net(), net()
    steps = [TrainStep(model, sgd(model, momentum=0.9)) for model in models]
    getattr(steps[1].config, switch)(True)
    assert_same(trained(steps[0], batches(2)), trained(steps[1], batches(2)))
    for name, tensor in weights(models[0]).items():
        torch.testing.assert_close(tensor, weights(models[1])[name], rtol=1e-6, atol=1e-7)


def test_eager_mode_and_the_graph_take_the_same_options() -> None:
    """`graph.eager(...)` is the same step run eagerly: with clipping, scaler and schedule."""
    model = net()
    other = copy.deepcopy(model)
    steps = []
    for side in (model, other):
        group = {"params": list(side.parameters()), "clip_grad_max_norm": 0.1}
        optimizer = flow.optim.AdamW([group], lr=0.01)
        steps.append(TrainStep(side, optimizer, of_flow.CosineDecayLR(optimizer, 5)))
        steps[-1].set_grad_scaler(flow.amp.StaticGradScaler(8.0))
    for x in batches(3):
        assert_same(steps[0](x).detach(), steps[1].eager(x).detach())
    assert_same(weights(model), weights(other))
