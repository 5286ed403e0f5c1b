"""Numbers that compare or print as one and are not: signs of zeros and NaNs, `1`, `1.0` and `True` as keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.call.numbers import exactly

X = torch.tensor([1.0, 2.0, -3.0])
NAN, MINUS_NAN = math.nan, -math.nan


def bytes_of(results: Any) -> list[tuple[torch.dtype, bytes]]:
    return [(item.dtype, item.contiguous().numpy().tobytes()) for item in results]


def constants(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
    reals = [
        fill(number) for number in (0.0, -0.0, NAN, MINUS_NAN, math.inf, -math.inf)
        for fill in (lambda n: torch.full_like(x, n), lambda n: x.masked_fill(x > 1, n), lambda n: x + torch.tensor(n))
    ]  # fmt: skip
    mixed = [torch.full(x.shape, number) for number in (1, 1.0, True, 0, -0.0)]
    complexes = [
        torch.full(x.shape, number, dtype=torch.complex64)
        for number in (0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(NAN, 1.0), complex(MINUS_NAN, math.inf))
    ]  # fmt: skip
    return [*reals, *mixed, *complexes]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_constants_keep_their_bits(backend: str) -> None:
    step = type("Step", (mg.Graph,), {"build": constants})()
    step.config.backend(backend)
    assert bytes_of(step(X)) == bytes_of(constants(None, X))


@pytest.mark.parametrize("rate", [NAN, MINUS_NAN])
def test_a_learning_rate_that_is_a_nan(rate: float) -> None:
    def trained(run: Any) -> bytes:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        run(layer, torch.optim.SGD(layer.parameters(), lr=rate))
        return layer.weight.detach().numpy().tobytes()

    def eager(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        layer(X).sum().backward()
        optimizer.step()

    def captured(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        class Step(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer
                self.add_optimizer(optimizer)

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss: torch.Tensor = self.layer(x).sum()
                loss.backward()
                return loss

        Step()(X)

    assert trained(eager) == trained(captured)


ARGUMENTS = (
    0.0, -0.0, NAN, MINUS_NAN, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(NAN, 1.0), complex(MINUS_NAN, 1.0),
)  # fmt: skip


def of_number(x: torch.Tensor, number: Any) -> list[torch.Tensor]:
    return [torch.full(x.shape, number), x * number]


class OfNumber(mg.Graph):
    def build(self, x: torch.Tensor, number: Any) -> list[torch.Tensor]:
        return of_number(x, number)


def test_arguments() -> None:
    step = OfNumber()
    for _ in range(2):
        for number in ARGUMENTS:
            assert bytes_of(step(X, number)) == bytes_of(of_number(X, number)), number
    assert len(step.builds) == 9 - 1, "0.0 and -0.0 are one input"


def of_keys(x: torch.Tensor, scales: dict[Any, torch.Tensor]) -> torch.Tensor:
    for key, scale in scales.items():
        number = key[0] if isinstance(key, tuple) else key
        x = x * scale * (1.0 + (bool, int, float, str).index(type(number)))
        x = x - 7.0 if str(number).startswith("-") else x
    return x


class OfKeys(mg.Graph):
    def build(self, x: torch.Tensor, scales: dict[Any, torch.Tensor]) -> torch.Tensor:
        return of_keys(x, scales)


@pytest.mark.long
def test_what_python_decides_on_numbers_that_are_not_finite() -> None:
    def build(self: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        return x + min(k, 1.0) if k > 2 else x * k

    step = type("Step", (mg.Graph,), {"build": build})()
    for k in (math.inf, 3.0, NAN, 2.0, -math.inf):
        assert bytes_of([step(X, k)]) == bytes_of([build(None, X, k)])


def test_keys_of_dicts_are_told_apart_by_type_and_sign() -> None:
    step = OfKeys()
    keys = (1, True, 1.0, "1", 0.0, -0.0, 0, False, (1,), (True,), (1.0,), (0.0,), (-0.0,))
    for _ in range(2):
        for key in keys:
            assert torch.equal(step(X, {key: X}), of_keys(X, {key: X})), key
    assert len(step.builds) == len(keys)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "number", [math.inf, NAN, MINUS_NAN, complex(0.0, -0.0), complex(NAN, 1.0)], ids=repr
)
def test_artifacts_keep_their_constants(number: complex, tmp_path: Path) -> None:
    step = OfNumber()
    expected = bytes_of(step(X, number))
    mg.save(step, tmp_path / "step")
    loaded = mg.load(tmp_path / "step")
    assert bytes_of(loaded(X, number)) == expected
    other = -number if isinstance(number, float) else complex(0.0, 1.0)
    with pytest.raises(mg.SignatureError, match="the artifact was made for"):
        loaded(X, other)


def test_equal_devices_are_one() -> None:
    assert exactly(torch.device("cpu")) == exactly(torch.device("cpu"))
    assert exactly((1, torch.device("cpu"))) != exactly((True, torch.device("cpu")))
