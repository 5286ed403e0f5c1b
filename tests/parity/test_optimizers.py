"""Every optimizer of torch in a graph: bitwise eager after each step, while the learning rate moves."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import monograph as mg
from monograph.errors import CaptureError, OptimizerError
from tests.parity.small import (
    Classifier,
    Matrices,
    PartlyTrained,
    TrainStep,
    WithScale,
    batches,
    check_parity,
    eager_trail,
    graph_trail,
    loss_of,
    make_side,
    one_thread,  # noqa: F401
    record,
    shrinking,
)
from tests.support import Side, assert_same


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first two parameters keep the default lr, the others have their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003}]


def two_tensor_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As `two_groups`, and every lr is a tensor."""
    first, second = two_groups(model)
    return [{**first, "lr": torch.tensor(0.01)}, {**second, "lr": torch.tensor(0.003, dtype=torch.float64)}]


@dataclass(frozen=True)
class Row:
    """One configuration; `builds` is how many the six steps need."""

    kind: type[Optimizer]
    options: dict[str, Any]
    builds: int = 1
    groups: Callable[[nn.Module], Any] = nn.Module.parameters

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind.__name__}({options}){'' if self.groups is nn.Module.parameters else '-' + self.groups.__name__}"

    @property
    def model(self) -> type[nn.Module]:
        return Matrices if self.kind is Muon else Classifier

    def make(self, model: nn.Module) -> Optimizer:
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return self.kind(self.groups(model), **options)


def rows(kind: type[Optimizer], *options: dict[str, Any], builds: int = 1) -> list[Row]:
    return [Row(kind, item, builds) for item in options]


def radam_builds(beta2: float, steps: int = 6) -> int:
    """RAdam updates in another way once the averaged length exceeds 5: the branches that the steps take."""
    longest = 2 / (1 - beta2) - 1
    return len({longest - 2 * t * beta2**t / (1 - beta2**t) > 5 for t in range(1, steps + 1)})


def asgd_builds(t0: float, *, foreach: bool, steps: int = 6) -> int:
    """ASGD takes `max(1, step - t0)`; one tensor at a time it also asks whether the last weight was 1."""
    weights = [1 / max(1, t - t0) for t in range(steps + 1)]
    return len({(t - t0 > 1, foreach or weights[t - 1] != 1) for t in range(1, steps + 1)})


def f32(number: float) -> torch.Tensor:
    return torch.tensor(number)


def f64(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


ROWS = [
    *rows(
        Adadelta,
        {},
        {"rho": 0.8, "eps": 1e-5, "weight_decay": 0.1},
        {"foreach": True},
        {"foreach": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"lr": f32(0.5)},
        {"lr": 1},
    ),
    *rows(
        Adafactor,
        {},
        {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2), "d": 1.2, "weight_decay": 0.1},
        {"foreach": True},
        {"foreach": True, "weight_decay": 0.1, "maximize": True},
        {"maximize": True, "weight_decay": 0.0},
        {"lr": f32(0.02)},
    ),
    *rows(
        Adagrad,
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        {"foreach": True, "lr_decay": 0.1},
        {"foreach": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"fused": True, "lr": f32(0.02), "lr_decay": 0.1, "weight_decay": 0.1},
        {"lr": f32(0.02)},
    ),
    *rows(
        Adam,
        {},
        {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
        {"foreach": True},
        {"foreach": True, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"fused": True, "lr": f32(0.02)},
        {"fused": True, "lr": f64(0.02), "amsgrad": True, "weight_decay": 0.1},
        {"lr": f32(0.02)},
    ),
    *rows(
        AdamW,
        {},
        {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
        {"foreach": True},
        {"foreach": True, "amsgrad": True, "maximize": True},
        {"foreach": False, "maximize": True},
        {"fused": True, "lr": f32(0.02)},
        {"fused": True, "lr": f64(0.02), "amsgrad": True, "maximize": True},
        {"lr": f64(0.02)},
    ),
    *rows(
        Adamax,
        {},
        {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
        {"foreach": True},
        {"foreach": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"lr": f32(0.02)},
    ),
    *rows(
        NAdam,
        {},
        {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "momentum_decay": 0.01},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"foreach": True},
        {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"lr": f32(0.02)},
    ),
    *rows(
        RMSprop,
        {},
        {"alpha": 0.9, "weight_decay": 0.1, "momentum": 0.9},
        {"centered": True, "momentum": 0.9},
        {"foreach": True},
        {"foreach": True, "centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
        {"foreach": False, "maximize": True},
        {"lr": f32(0.02)},
    ),
    *rows(
        Rprop,
        {},
        {"etas": (0.4, 1.3), "step_sizes": (1e-5, 0.02)},
        {"foreach": True},
        {"foreach": True, "maximize": True},
        {"foreach": False, "maximize": True},
        {"lr": f32(0.02)},
    ),
    *rows(
        SGD,
        {},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True},
        {"lr": 0.1, "weight_decay": 0.1, "foreach": True, "maximize": True},
        {"lr": f32(0.1), "fused": True},
        {"lr": f64(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
        {"lr": f32(0.1), "momentum": 0.9},
        {"lr": f32(0.1), "momentum": 0.9, "foreach": True},
    ),
    # with dampening the first momentum is the whole gradient, later ones take a part: the first step is its own
    *rows(
        SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True, "maximize": True},
        {"lr": f32(0.1), "momentum": 0.9, "dampening": 0.5, "fused": True},
        builds=2,
    ),
    *[
        Row(RAdam, options, radam_builds(options.get("betas", (0.9, 0.999))[1]))
        for options in (
            {},
            {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
            {"betas": (0.8, 0.5), "decoupled_weight_decay": True, "weight_decay": 0.1},
            {"foreach": True},
            {"foreach": True, "betas": (0.8, 0.9), "decoupled_weight_decay": True, "weight_decay": 0.1},
            {"foreach": True, "weight_decay": 0.1, "maximize": True},
            {"foreach": False, "maximize": True},
            {"lr": f32(0.02)},
        )
    ],
    *[
        Row(ASGD, options, asgd_builds(options.get("t0", 1e6), foreach=options.get("foreach", False)))
        for options in (
            {},
            {"lambd": 0.01, "alpha": 0.6, "weight_decay": 0.1, "t0": 2.0},
            {"foreach": True},
            {"foreach": True, "weight_decay": 0.1, "t0": 2.0, "maximize": True},
            {"foreach": False, "maximize": True},
            {"lr": f32(0.02), "t0": 0.0},
        )
    ],
    *rows(
        Muon,
        {},
        {"weight_decay": 0.2, "momentum": 0.8, "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-6},
        {"ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": "original"},
        {"lr": f32(0.02)},
    ),
    *[
        Row(kind, {"lr": 0.01}, groups=two_groups)
        for kind in (
            Adadelta,
            Adafactor,
            Adagrad,
            Adam,
            AdamW,
            Adamax,
            ASGD,
            NAdam,
            RMSprop,
            Rprop,
            SGD,
            Muon,
        )
    ],
    Row(RAdam, {"lr": 0.01}, radam_builds(0.999), two_groups),
    Row(Adam, {"lr": 0.01, "foreach": True}, groups=two_groups),
    *[
        Row(kind, {"lr": f32(0.01), "foreach": True})
        for kind in (Adadelta, Adafactor, Adagrad, Adamax, ASGD, NAdam, RMSprop, Rprop)
    ],
    Row(RAdam, {"lr": f32(0.01), "foreach": True}, radam_builds(0.999)),
    *[Row(kind, {"lr": torch.tensor([0.01])}) for kind in (Adafactor, Adam, SGD)],
    Row(AdamW, {"lr": 0.01, "fused": True, "foreach": False}, groups=two_tensor_groups),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_steps_are_bitwise_eager(row: Row) -> None:
    check_parity(lambda: make_side(row.make, model=row.model), builds=row.builds)


def test_no_optimizer_of_torch_is_forgotten() -> None:
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    refused = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    assert {row.kind for row in ROWS} == kinds - refused
    assert all(sum(row.kind is kind for row in ROWS) >= 3 for kind in kinds - refused)


# --- numbers that move in other ways ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Adadelta, Adam, Rprop, SGD])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_parameter_that_is_a_single_number(kind: type[Optimizer], foreach: bool) -> None:
    check_parity(lambda: make_side(lambda m: kind(m.parameters(), lr=0.01, foreach=foreach), model=WithScale))


@pytest.mark.parametrize("kind", [Adafactor, AdamW, RMSprop, SGD])
def test_a_lr_that_starts_at_zero(kind: type[Optimizer]) -> None:
    def warmup(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, step / 3))

    check_parity(lambda: make_side(lambda m: kind(m.parameters(), lr=0.01), warmup))


@pytest.mark.parametrize("kind", [Adagrad, Adam, AdamW, SGD])
def test_a_float_lr_of_a_fused_optimizer_needs_no_build(kind: type[Optimizer]) -> None:
    check_parity(lambda: make_side(lambda m: kind(m.parameters(), lr=0.02, fused=True)))


def test_hyperparameters_moved_by_hand_need_no_build() -> None:
    def move(index: int, side: Side) -> None:
        for group in side.optimizer.param_groups:
            group["betas"] = (0.9 - 0.01 * index, 0.99 - 0.01 * index)
            group["weight_decay"] = 0.1 + index
            group["eps"] = 1e-8 * (index + 1)

    check_parity(lambda: make_side(lambda m: AdamW(m.parameters())), between=move)


def test_a_hyperparameter_that_becomes_zero_takes_another_branch() -> None:
    def move(index: int, side: Side) -> None:
        side.optimizer.param_groups[0]["weight_decay"] = (0.1, 0.0, 0.0, 0.2, 0.0, 0.1)[index]

    check_parity(
        lambda: make_side(lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.3)), builds=2, between=move
    )


def test_a_flag_of_a_param_group_is_a_guarded_fact() -> None:
    def flip(index: int, side: Side) -> None:
        side.optimizer.param_groups[0]["nesterov"] = index % 2 == 0

    check_parity(
        lambda: make_side(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)), builds=2, between=flip
    )


def test_a_lr_that_becomes_a_tensor_is_followed() -> None:
    def change(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)

    check_parity(
        lambda: make_side(lambda m: Adam(m.parameters(), lr=0.1), scheduler=None), builds=2, between=change
    )


@pytest.mark.parametrize("kind", [ASGD, Rprop])
def test_state_that_starts_from_lr_takes_it_at_the_first_step(kind: type[Optimizer]) -> None:
    expected = make_side(lambda m: kind(m.parameters(), lr=0.01), scheduler=None)
    side = make_side(lambda m: kind(m.parameters(), lr=0.01), scheduler=None)
    step = TrainStep(side)
    step.compile(*batches(1)[0])
    for changed in (expected, side):
        changed.optimizer.param_groups[0]["lr"] = 0.05
    assert_same(eager_trail(expected, batches(3)), graph_trail(side, step, batches(3)))


def test_compiling_leaves_the_optimizer_as_it_was() -> None:
    side = make_side(lambda m: Adam(m.parameters()))
    step = TrainStep(side)
    before = record(side, torch.zeros(()))
    step.compile(*batches(1)[0])
    assert_same(before, record(side, torch.zeros(())))
    step.compile(*[argument[:2] for argument in batches(1)[0]])
    assert_same(before, record(side, torch.zeros(())))
    steps = [
        tuple(argument[:size] for argument in batch)
        for size, batch in zip((5, 2, 5), batches(3), strict=True)
    ]
    expected = eager_trail(make_side(lambda m: Adam(m.parameters())), steps)
    assert_same(expected, graph_trail(side, step, steps))
    assert len(step.builds) == 2


def test_an_eager_step_may_come_between_compiling_and_the_first_step() -> None:
    def make() -> Side:
        return make_side(lambda m: Rprop(m.parameters(), lr=0.01))

    side = make()
    step = TrainStep(side)
    step.compile(*batches(1)[0])
    got = eager_trail(side, batches(1)) + graph_trail(side, step, batches(3)[1:])
    assert_same(eager_trail(make(), batches(3)), got)


def test_adafactor_clips_as_python_does_when_a_number_is_nan() -> None:
    def spoil(optimizer: Optimizer, *_: Any) -> None:
        tokens = optimizer.param_groups[0]["params"][0]
        tokens.grad[10] = float("nan")

    def make() -> Side:
        side = make_side(lambda m: Adafactor(m.parameters()))
        side.optimizer.register_step_pre_hook(spoil)
        return side

    check_parity(make)


# --- eager steps before, between and after steps of the graph -----------------------------------------------------


WARM = [
    *[(kind, {"lr": 0.01}, 1) for kind in (Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam)],
    *[(kind, {"lr": 0.01}, 1) for kind in (RMSprop, Rprop, Muon)],
    (SGD, {"lr": 0.1, "momentum": 0.9}, 1),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, 1),
    (Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}, 1),
    (AdamW, {"lr": f32(0.01), "fused": True}, 1),
    (RAdam, {"lr": 0.01}, 1),
]


@pytest.mark.parametrize(("kind", "options", "builds"), WARM)
def test_eager_steps_and_graph_steps_mix(kind: type[Optimizer], options: dict[str, Any], builds: int) -> None:
    """Five eager steps first: RAdam's rectified branch is the only one that the graph sees."""
    row = Row(kind, options)
    steps = batches(10)
    expected = eager_trail(make_side(row.make, model=row.model), steps)
    side = make_side(row.make, model=row.model)
    step = TrainStep(side)
    got = eager_trail(side, steps[:5])
    got += graph_trail(side, step, steps[5:7])
    got += eager_trail(side, steps[7:8])
    got += graph_trail(side, step, steps[8:])
    assert_same(expected, got)
    assert len(step.builds) == builds


# --- optimizers that torch does not have ----------------------------------------------------------------------------


class Lion(Optimizer):
    """Signs of a mix of gradient and momentum; the momentum is changed in place."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self.update(parameter, self.state[parameter], group)

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        direction = state["momentum"].mul(first).add_(parameter.grad, alpha=1 - first).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        state["momentum"].mul_(second).add_(parameter.grad, alpha=1 - second)


class LionWithNewTensors(Lion):
    """The momentum is another tensor after each step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        direction = (first * state["momentum"] + (1 - first) * parameter.grad).sign()
        parameter.sub_(group["lr"] * direction)
        state["momentum"] = second * state["momentum"] + (1 - second) * parameter.grad


class LionWithCounter(Lion):
    """A step counter that is a Python int, used in the formula."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        correction = 1 - second ** state["step"]
        state["momentum"].mul_(second).add_(parameter.grad, alpha=1 - second)
        direction = (state["momentum"] / correction).mul_(first).add_(parameter.grad, alpha=1 - first)
        parameter.add_(direction.sign_(), alpha=-group["lr"])


class LionWithSquareRoot(LionWithCounter):
    """`math.sqrt` of a number that moves, as many optimizers write their bias correction."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
        state["step"] += 1
        rate = group["lr"] * math.sqrt(1 - group["betas"][1] ** state["step"])
        parameter.add_(parameter.grad.sign(), alpha=-rate * math.pow(0.9, state["step"]))


class LionWithDecay(Lion):
    """A counter that is a Python float, multiplied at each step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["weight"] = 1.0
        state["weight"] *= group["betas"][0]
        parameter.add_(parameter.grad.sign(), alpha=-group["lr"] * state["weight"])


class LionEverySecondStep(Lion):
    """Branches on its own counter: two ways to step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
        state["step"] += 1
        if state["step"] % 2 == 0:
            parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        else:
            parameter.add_(parameter.grad, alpha=-group["lr"])


class LionFromFirstGradient(Lion):
    """The momentum starts as the first gradient: the first step is its own."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = parameter.grad.clone()
        else:
            state["momentum"].lerp_(parameter.grad, 1 - group["betas"][1])
        parameter.add_(state["momentum"].sign(), alpha=-group["lr"])


class LionThatSkipsItsFirstStep(Lion):
    """The first step only makes the state, as SOAP does: finding it there would be another step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            return
        super().update(parameter, state, group)


class LionWithNestedState(Lion):
    """Lists and dicts of tensors and numbers in the state."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sums"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            state["more"] = {"step": 0, "last": torch.zeros_like(parameter)}
        sums, more = state["sums"], state["more"]
        sums[0].add_(parameter.grad)
        sums[1] = sums[0] * 2
        more["step"] += 1
        parameter.add_(sums[1] - more["last"], alpha=-group["lr"] / more["step"])
        more["last"] = more["last"] + parameter.grad


class LionWithSharedState(Lion):
    """State that belongs to no parameter; it appears in the first step, which is therefore its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"]
        if not shared:
            shared["norm"] = torch.zeros(())
            shared["step"] = 0
        shared["step"] += 1
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        shared["norm"] += torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / shared["norm"] * shared["step"] * self.param_groups[0]["lr"])


class LionWithHistory(Lion):
    """A window of the last gradients, which grows for three steps."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["window"] = torch.zeros(0, *parameter.shape)
        state["window"] = torch.cat([state["window"], parameter.grad[None]])[-3:]
        parameter.add_(state["window"].mean(0), alpha=-group["lr"])


class LionWithNoise(Lion):
    """Draws random numbers, and asks for state that it leaves empty."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_((parameter.grad + torch.randn_like(parameter)) * group["lr"])


class LionOnTopOfAdam(Adam):
    """Another optimizer's step between changes of gradients and of parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.detach().sign(), alpha=0.01)
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-1, 1)
        return result


class LionWithDefaults(Lion):
    """Reads a number of its own, and one of its defaults."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = 1.0

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad.sign() * self.scale * self.defaults["lr"])


class LionWithGroupCounter(Lion):
    """The counter is in the param group, as in schedule-free optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] / group["step"] ** 0.5)


class LionWithGroupSum(Lion):
    """A running sum of learning rates in the param group: a float that the step itself changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["lr_sum"] = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr_sum"] += group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-(group["lr"] ** 2) / group["lr_sum"])


class LionWithOwnCounter(Lion):
    """The counter is an attribute of the optimizer itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] / self.steps_done)


CUSTOM = [
    (Lion, 1),
    (LionWithNewTensors, 1),
    (LionWithCounter, 1),
    (LionWithSquareRoot, 1),
    (LionWithDecay, 1),
    (LionEverySecondStep, 2),
    (LionFromFirstGradient, 2),
    (LionThatSkipsItsFirstStep, 2),
    (LionWithNestedState, 1),
    (LionWithSharedState, 2),
    (LionWithHistory, 4),
    (LionWithNoise, 1),
    (LionOnTopOfAdam, 1),
    (LionWithGroupCounter, 1),
    (LionWithGroupSum, 1),
]


@pytest.mark.parametrize(("kind", "builds"), CUSTOM)
def test_an_optimizer_of_ones_own(kind: type[Optimizer], builds: int) -> None:
    check_parity(lambda: make_side(lambda m: kind(m.parameters())), builds=builds)


class LionThatDropsState(Lion):
    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        del state["momentum"]


class LionWithMovingList(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["history"] = [0.1, 0.2]

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["history"][0] *= 1.5


class LionWithMovingBetas(Lion):
    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])


REFUSED = [
    (LionThatDropsState, "optimizer.0/model.tokens.weight/momentum"),
    (LionWithMovingList, "optimizer.0/group0/history"),
    (LionWithMovingBetas, "optimizer.0/group0/betas"),
]


def test_an_optimizer_that_counts_in_an_attribute_counts_as_in_eager_mode() -> None:
    data = batches(3)
    side = make_side(lambda model: LionWithOwnCounter(model.parameters()), scheduler=None)
    other = make_side(lambda model: LionWithOwnCounter(model.parameters()), scheduler=None)
    assert_same(eager_trail(other, data), graph_trail(side, TrainStep(side), data))
    assert side.optimizer.steps_done == other.optimizer.steps_done == 3


def test_a_decay_above_one_is_told() -> None:
    """The bias correction would be negative, and its square root no real number."""
    side = make_side(lambda model: Adam(model.parameters()), scheduler=None)
    step = TrainStep(side)
    (batch,) = batches(1)
    loss = step(*batch)
    side.optimizer.param_groups[0]["betas"] = (0.9, 1.1)
    before = record(side, loss)
    with pytest.raises(CaptureError, match=r"betas/1 .*<= 1\.0` is no longer taken"):
        step(*batch)
    assert_same(before, record(side, loss))
    side.optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    step(*batch)
    assert len(step.builds) == 1


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_what_an_optimizer_may_not_change_is_refused_by_name(kind: type[Optimizer], name: str) -> None:
    side = make_side(lambda m: kind(m.parameters()))
    if kind is LionThatDropsState:  # state that is there before
        for parameter in side.model.parameters():
            side.optimizer.state[parameter]["momentum"] = torch.zeros_like(parameter)
    before = record(side, torch.zeros(()))
    with pytest.raises(CaptureError, match=re.escape(name)):
        TrainStep(side)(*batches(1)[0])
    assert_same(before, record(side, torch.zeros(())))


def test_numbers_of_an_optimizer_of_ones_own_are_guarded_facts() -> None:
    def change(index: int, side: Side) -> None:
        side.optimizer.scale = (1.0, 0.5, 0.5, 0.5, 0.5, 0.5)[index]
        side.optimizer.defaults["lr"] = (0.01, 0.01, 0.01, 0.05, 0.05, 0.05)[index]

    check_parity(lambda: make_side(lambda m: LionWithDefaults(m.parameters())), builds=3, between=change)


@pytest.mark.parametrize("kind", [Lion, LionWithNewTensors, LionWithCounter, LionFromFirstGradient])
def test_an_optimizer_of_ones_own_starts_warm(kind: type[Optimizer]) -> None:
    steps = batches(6)
    expected = eager_trail(make_side(lambda m: kind(m.parameters())), steps)
    side = make_side(lambda m: kind(m.parameters()))
    step = TrainStep(side)
    got = eager_trail(side, steps[:2]) + graph_trail(side, step, steps[2:])
    assert_same(expected, got)
    assert len(step.builds) == 1


@pytest.mark.parametrize("kind", [Adam, Adafactor, RAdam, Lion, LionWithCounter, LionWithGroupCounter])
def test_two_steps_in_one_build(kind: type[Optimizer]) -> None:
    """`build()` steps the optimizer itself, twice. RAdam's branch falls between the two steps of the third call."""

    class Twice(TrainStep):
        def __init__(self, side: Side) -> None:
            mg.Graph.__init__(self)
            self.model = side.model
            self.add_optimizer(side.optimizer, manual=True)
            self.optimizer = side.optimizer

        def build(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            super().build(tokens, target)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss = super().build(tokens, target)
            self.optimizer.step()
            return loss

    def make() -> Side:
        return make_side(lambda m: kind(m.parameters()), scheduler=None)

    doubled = [batch for batch in batches(4) for _ in range(2)]
    side = make()
    step = Twice(side)
    assert_same(eager_trail(make(), doubled)[1::2], graph_trail(side, step, batches(4)))
    assert len(step.builds) == (3 if kind is RAdam else 1)


# --- parameters without gradient ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        *[
            Row(kind, {"lr": 0.01})
            for kind in (Adadelta, Adafactor, Adagrad, Adam, Adamax, ASGD, NAdam, RMSprop)
        ],
        *[Row(kind, {"lr": 0.01, "foreach": True}) for kind in (Adam, SGD, Rprop)],
        Row(SGD, {"lr": 0.1, "momentum": 0.9}),
        Row(AdamW, {"lr": f32(0.01), "fused": True}),
        Row(RAdam, {"lr": 0.01}, radam_builds(0.999)),
        Row(LionWithCounter, {}),
    ],
    ids=str,
)
def test_parameters_without_gradient_stay_and_get_no_state(row: Row) -> None:
    check_parity(lambda: make_side(row.make, model=PartlyTrained), builds=row.builds)


# --- several optimizers, hooks, and changes between steps ---------------------------------------------------------------


def test_two_optimizers_with_a_scheduler_each() -> None:
    def optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
        return SGD(model.tokens.parameters(), lr=0.1, momentum=0.9), AdamW(model.layers.parameters())

    class Both(mg.Graph):
        def __init__(self, sides: list[Side]) -> None:
            super().__init__()
            self.model = sides[0].model
            for side in sides:
                self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

        def build(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = loss_of(self.model, tokens, target)
            loss.backward()
            return loss

    def make() -> list[Side]:
        torch.manual_seed(0)
        model = Classifier()
        return [Side(model, held, shrinking(held)) for held in optimizers(model)]

    eager, graph = make(), make()
    step = Both(graph)
    for batch in batches():
        eager[0].model.zero_grad()
        loss = loss_of(eager[0].model, *batch)
        loss.backward()
        for side in eager:
            side.optimizer.step()
            side.scheduler.step()
        got = step(*batch)
        for expected, side in zip(eager, graph, strict=True):
            assert_same(record(expected, loss), record(side, got))
    assert len(step.builds) == 1


def scale_gradients(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def shrink_parameters(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


def test_hooks_around_the_step_are_part_of_the_graph() -> None:
    def make() -> Side:
        side = make_side(lambda m: Adam(m.parameters()))
        side.optimizer.register_step_pre_hook(scale_gradients)
        side.optimizer.register_step_post_hook(shrink_parameters)
        return side

    check_parity(make)


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_comes_and_goes_is_followed(name: str) -> None:
    hook = scale_gradients if name == "register_step_pre_hook" else shrink_parameters
    handles: list[Any] = []

    def change(index: int, side: Side) -> None:
        if index == 1:
            handles.append(getattr(side.optimizer, name)(hook))
        if index == 3:
            handles.pop().remove()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=change)


def test_a_hook_of_all_optimizers_is_followed() -> None:
    handles: list[Any] = []

    def change(index: int, side: Side) -> None:
        if index == 1:
            handles.append(register_optimizer_step_post_hook(shrink_parameters))
        if index == 3:
            handles.pop().remove()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=change)


@pytest.mark.parametrize(
    "row", [Row(Adam, {}), Row(SGD, {"lr": 0.1, "momentum": 0.9}), Row(LionWithCounter, {})], ids=str
)
def test_loaded_state_is_taken_over(row: Row) -> None:
    other = make_side(row.make)
    eager_trail(other, batches(3))
    saved = copy.deepcopy(other.optimizer.state_dict())

    def load(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.load_state_dict(copy.deepcopy(saved))

    check_parity(lambda: make_side(row.make), builds=1, between=load)


def test_state_that_is_cleared_starts_anew() -> None:
    def clear(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.state.clear()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=clear)


def test_a_param_group_that_is_added_is_trained() -> None:
    def add(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.add_param_group({"params": side.model.tokens.parameters(), "lr": 0.05})

    check_parity(
        lambda: make_side(lambda m: Adam(m.layers.parameters()), scheduler=None), builds=2, between=add
    )


def test_a_parameter_that_is_frozen_between_steps_stays() -> None:
    def freeze(index: int, side: Side) -> None:
        side.model.tokens.weight.requires_grad_(index not in (1, 2))

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=freeze)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_no_graph_can_hold_is_refused_by_name(kind: type[Optimizer]) -> None:
    side = make_side(lambda m: kind(m.parameters()), scheduler=None)
    with pytest.raises(OptimizerError, match=kind.__name__):
        TrainStep(side)


class HalfOfTheFirst(SGD):
    """A step of the user's own that looks like torch's: its first momentum is half of the gradient."""

    @functools.wraps(SGD.step)
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    first = "momentum_buffer" not in state
                    state["momentum_buffer"] = (
                        parameter.grad * 0.5 if first else state["momentum_buffer"] + parameter.grad
                    )
                    parameter.sub_(state["momentum_buffer"], alpha=group["lr"])


def test_a_step_that_wraps_torchs_is_not_taken_for_it() -> None:
    def make(model: nn.Module) -> Optimizer:
        return HalfOfTheFirst(model.parameters(), lr=0.1, momentum=0.9)

    eager, side = make_side(make), make_side(make)
    expected = eager_trail(eager, batches())
    assert_same(expected, graph_trail(side, TrainStep(side), batches()))
