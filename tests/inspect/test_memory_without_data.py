"""memory() of models on the device meta: as large as they come, planned with little memory, in time that grows with the ops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.support.llama import SEVEN_BILLION, SEVENTY_BILLION, Shape, Training


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (replace(SEVEN_BILLION, layers=2), 0.7),
        pytest.param(replace(SEVENTY_BILLION, layers=2), 2.2, marks=pytest.mark.long),
        pytest.param(SEVEN_BILLION, 6.7, marks=pytest.mark.long),
        pytest.param(SEVENTY_BILLION, 69.0, marks=pytest.mark.long),
    ],
    ids=["two layers of 7B", "two layers of 70B", "7B", "70B"],
)
def test_a_large_model_is_planned(shape: Shape, billions: float) -> None:
    step = Training(shape)
    step.config.enable_straighten_algorithm(
        "SpeedFirst"
    )  # nothing is computed again: all layers hold the same
    report = step.memory(mg.spec((1, shape.length), torch.int64, "meta"))
    parameters = list(step.model.parameters())
    held, buffers = sum(item.nbytes for item in parameters), step.model.cos.nbytes + step.model.sin.nbytes
    assert sum(item.numel() for item in parameters) / 1e9 == pytest.approx(billions, rel=0.05)
    assert report.state_bytes == 3 * held + 4 * len(parameters) + buffers
    assert report.by_kind()["parameters"] == held
    assert sum(report.by_kind().values()) == report.total_bytes
    layers = report.by_module()
    assert layers["model.layers.0"] == layers["model.layers.1"]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.5),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
    ],
    ids=["momentum", "dampening", "amsgrad", "adagrad", "rmsprop"],
)
def test_optimizers_hold_there_what_they_hold_elsewhere(optimizer: Callable[[Any], Any]) -> None:
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))
            step = mg.train_graph(model, nn.MSELoss(), optimizer(model.parameters()))
        report = step.memory(mg.spec((16, 12), device=device), mg.spec((16, 1), device=device))
        found.append((report.by_kind(), report.peak_bytes, report.state_bytes))
    assert found[0] == found[1]


def test_gradients_are_clipped_and_scaled_there() -> None:
    class Clipping(mg.Graph):
        def __init__(self, device: str) -> None:
            super().__init__()
            with torch.device(device):
                self.model = nn.Linear(16, 4)
                self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
            self.config.enable_amp(dtype=torch.bfloat16)

        def build(self, x: Tensor) -> Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

    found = [Clipping(device).memory(mg.spec((8, 16), device=device)) for device in ("cpu", "meta")]
    assert found[0].by_kind() == found[1].by_kind()


def test_kernels_are_chosen_as_with_data() -> None:
    class Attending(mg.Graph):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.weight = nn.Linear(16, 16, device=device)
            self.config.keep_gradients()

        def build(self, x: Tensor) -> Tensor:
            made = self.weight(x)
            loss = nn.functional.scaled_dot_product_attention(made, made, made, is_causal=True).sum()
            loss.backward()
            return loss

    found = [Attending(device).memory(mg.spec((2, 4, 128, 16), device=device)) for device in ("cpu", "meta")]
    assert [point.op for point in found[0].timeline] == [point.op for point in found[1].timeline]


def test_numbers_that_are_read_are_planned_too() -> None:
    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, device="meta")

        def build(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer.weight.norm().item()

    assert Scaled().memory(mg.spec((8, 4), device="meta")).peak_bytes >= 8 * 4 * 4


@pytest.mark.long
def test_work_grows_with_the_number_of_ops() -> None:
    calls = {layers: calls_of(lambda layers=layers: planned(layers)) for layers in (8, 8, 16, 32)}
    assert calls[32] - calls[16] <= 2.2 * (calls[16] - calls[8])


def planned(layers: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.ReLU())))
        step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    step.memory(mg.spec((4, 8), device="meta"), mg.spec((4, 8), device="meta"))


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions are called, as the measure of work that no other process disturbs."""
    count, before = 0, sys.getprofile()

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event.endswith("call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
