"""Every optimizer of torch in a graph: bitwise eager after each step, while the learning rate moves."""

from __future__ import annotations

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

from tests.parity.small import Classifier, Matrices, check_parity, make_side


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first two parameters keep the default lr, the others have their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003}]


@dataclass(frozen=True)
class Row:
    """One configuration; `builds` is how many the six steps need."""

    kind: type[Optimizer]
    options: dict[str, Any]
    builds: int = 1
    groups: Callable[[nn.Module], Any] = nn.Module.parameters

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind.__name__}({options}){'-two_groups' if self.groups is two_groups else ''}"

    @property
    def model(self) -> type[nn.Module]:
        return Matrices if self.kind is Muon else Classifier

    def make(self, model: nn.Module) -> Optimizer:
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return self.kind(self.groups(model), **options)


def rows(kind: type[Optimizer], *options: dict[str, Any], builds: int = 1) -> list[Row]:
    return [Row(kind, item, builds) for item in options]


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
    *rows(
        Muon,
        {},
        {"weight_decay": 0.2, "momentum": 0.8, "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-6},
        {"ns_coefficients": (3.0, -4.0, 2.0), "adjust_lr_fn": "original"},
        {"lr": f32(0.02)},
    ),
    *[
        Row(kind, {"lr": 0.01, **options}, groups=two_groups)
        for kind in (Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop, Rprop, SGD, Muon)
        for options in ({},)
    ],
    Row(Adam, {"foreach": True}, groups=two_groups),
    Row(AdamW, {"lr": f32(0.01), "fused": True}, groups=two_groups),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_steps_are_bitwise_eager(row: Row) -> None:
    check_parity(lambda: make_side(row.make, model=row.model), builds=row.builds)
