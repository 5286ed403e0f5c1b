"""Every optimizer of torch in a graph: bitwise eager after each step, while the learning rate moves."""

from __future__ import annotations

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

from tests.capture.optimizers.rows import LionWithCounter, Row
from tests.support import Side, assert_same
from tests.support.small import (
    PartlyTrained,
    TrainStep,
    WithScale,
    batches,
    check_parity,
    eager_trail,
    graph_trail,
    make_side,
    one_thread,  # noqa: F401
    record,
)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first two parameters keep the default lr, the others have their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003}]


def two_tensor_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As `two_groups`, and every lr is a tensor."""
    first, second = two_groups(model)
    return [{**first, "lr": torch.tensor(0.01)}, {**second, "lr": torch.tensor(0.003, dtype=torch.float64)}]


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


# --- numbers that move in other ways ------------------------------------------------------------------------


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


@pytest.mark.one_case
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


# --- eager steps before, between and after steps of the graph -----------------------------------------------


WARM = [
    *[(kind, {"lr": 0.01}, 1) for kind in (Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam)],
    *[(kind, {"lr": 0.01}, 1) for kind in (RMSprop, Rprop, Muon)],
    (SGD, {"lr": 0.1, "momentum": 0.9}, 1),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, 1),
    (Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}, 1),
    (AdamW, {"lr": f32(0.01), "fused": True}, 1),
    (RAdam, {"lr": 0.01}, 1),
]


@pytest.mark.one_case
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


# --- parameters without gradient ----------------------------------------------------------------------------


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
