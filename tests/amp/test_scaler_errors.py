"""What build() may not do with the graph's scaler: each mistake is named, with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.errors import CaptureError, OptimizerError
from tests.amp.mixed import Recipe, adamw, growing, infinite_at


class Misused(mg.Graph):
    def __init__(self, body: Callable[..., Any], *, manual: bool) -> None:
        super().__init__()
        side = Recipe(adamw, scaler=growing).side()
        self.model, self.body, self.scaler = side.model, body, side.scaler
        self.add_optimizer(side.optimizer, manual=manual)
        self.held = [side.optimizer]
        self.set_grad_scaler(side.scaler)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.body(self, F.cross_entropy(self.model(x), y))


def scales(self: Any, loss: Any) -> None:
    self.scaler.scale(loss).backward()  # here


def steps(self: Any, loss: Any) -> None:
    loss.backward()
    self.scaler.step(self.held[0])  # here


def updates(self: Any, loss: Any) -> None:
    loss.backward()
    self.scaler.update()  # here


def sets_growth(self: Any, loss: Any) -> None:
    self.scaler.set_growth_factor(3.0)  # here
    loss.backward()


def loads(self: Any, loss: Any) -> None:
    self.scaler.load_state_dict({})  # here
    loss.backward()


def unscales_another(self: Any, loss: Any) -> None:
    loss.backward()
    self.scaler.unscale_(torch.optim.SGD(self.model.parameters(), 0.1))  # here


def sets_gradients(self: Any, loss: Any) -> None:
    parameters = list(self.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient  # here


def adds_to_unscaled(self: Any, loss: Any) -> None:
    loss.backward(retain_graph=True)
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    loss.backward()  # here


def steps_twice(self: Any, loss: Any) -> None:
    loss.backward()
    self.held[0].step()
    self.held[0].step()  # here


def steps_too_early(self: Any, loss: Any) -> None:
    self.held[0].step()  # here


@pytest.mark.parametrize("eager", [False, True], ids=["capture", "eager"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (scales, r"build\(\) calls scale\(\) of the graph's scaler"),
        (steps, r"build\(\) calls step\(\) of the graph's scaler"),
        (updates, r"build\(\) calls update\(\) of the graph's scaler"),
        (sets_growth, r"build\(\) calls set_growth_factor\(\) of the graph's scaler"),
        (loads, r"build\(\) calls load_state_dict\(\) of the graph's scaler"),
        (unscales_another, r"unscale_\(\) gets an optimizer that the graph does not hold \(SGD\)"),
        (sets_gradients, r"build\(\) sets gradients of optimizer.0 before any backward\(\)"),
        (adds_to_unscaled, r"backward\(\) adds to gradients of optimizer.0 that are unscaled already"),
        (steps_twice, r"build\(\) steps optimizer.0 twice"),
        (steps_too_early, r"build\(\) steps optimizer.0 when none of its parameters has a gradient"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_misuse_is_named_with_the_users_line(body: Any, message: str, eager: bool) -> None:
    step = Misused(body, manual=body in (steps_twice, steps_too_early))
    with pytest.raises(CaptureError, match=message) as raised:
        (step.eager if eager else step)(*infinite_at()[0])
    assert raised.value.hint
    assert raised.value.where.file == __file__
    line = Path(__file__).read_text().splitlines()[raised.value.where.line - 1]
    assert line.endswith("# here"), line
    assert not vars(step.scaler)["_per_optimizer_states"]
    assert "step" not in vars(step.held[0])
    assert isinstance(raised.value, OptimizerError) == (body in (steps_twice, steps_too_early))
