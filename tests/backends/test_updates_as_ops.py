"""Updates that reach Inductor as one op each: the bits of plain PyTorch, in place, whatever else reads or writes state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import monograph as mg
from monograph.compat.inductor import lowerings
from tests.backends.test_exact import OPTIMIZERS
from tests.support import new_cache, same_bits

SIZES = ((), (1,), (5, 7), (33,), (20_011,))


class Weights(nn.Module):
    """Weights whose gradients are what they are multiplied with: no rounding comes before the update."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.items = nn.ParameterList(torch.randn(size, generator=source).to(dtype) for size in SIZES)
        self.register_buffer("earlier", torch.zeros(33, dtype=dtype))

    def forward(self, *factors: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.items, factors, strict=True)]).sum()


def factors(number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What the weights are multiplied with."""
    source = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=source).to(dtype) for size in SIZES]


class Step(mg.Graph):
    """A step that also gives what a weight was before, doubled."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.backend("inductor")

    def build(self, *given: torch.Tensor) -> Any:
        before = self.model.items[3] * 2
        self.model.earlier.copy_(self.model.items[3].detach())
        self.model(*given).backward()
        return before


def texts(step: mg.Graph) -> list[str]:
    """The calls of updates in the program that Inductor got."""
    return [line for line in str(step.show("inductor")).splitlines() if "monograph.update" in line]


def tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """All that an update writes."""
    state = [item for found in optimizer.state.values() for item in found.values()]
    return [*model.parameters(), *(item for item in state if isinstance(item, torch.Tensor))]


def trained(
    name: str, dtype: torch.dtype, steps: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor], mg.Graph]:
    """What a step and plain PyTorch make of the same weights."""
    model, plain = Weights(dtype), Weights(dtype)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    step = Step(model, optimizer)
    for number in range(steps):
        given = factors(number, dtype)
        before = model.items[3].detach().clone()
        assert same_bits(step(*given), before * 2)
        assert same_bits(model.earlier, before)
        other.zero_grad()
        plain(*given).backward()
        other.step()
        for groups in (optimizer.param_groups, other.param_groups):
            if not isinstance(groups[0]["lr"], torch.Tensor):
                groups[0]["lr"] *= 0.7
    assert [build.backend for build in step.builds] == ["inductor"]
    return tensors(model, optimizer), tensors(plain, other), step


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "dtype", "left"),
    [
        ("nesterov", torch.float32, 0),
        ("lists", torch.float32, 0),
        ("amsgrad", torch.float32, 0),
        ("rmsprop", torch.float64, -len(SIZES)),  # counters that nothing reads are updates of their own
        ("adamw", torch.float64, 1),  # a weight of no dimension, beside a counter of another type
    ],
)
def test_updates_are_one_op_each_with_the_numbers_of_plain_pytorch(name, dtype, left):
    found, expected, step = trained(name, dtype)
    assert len(texts(step)) == len(SIZES) - left
    assert len({line.rpartition("'monograph_update_")[2][:16] for line in texts(step)}) <= 3
    for one, other in zip(found, expected, strict=True):
        if name == "nesterov":
            assert same_bits(one, other)
        else:  # a fifth of eager's roots of float32 are not the nearest number
            rtol, atol = (1e-6, 1e-7) if dtype is torch.float32 else (1e-13, 1e-14)
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.long
def test_an_update_that_may_not_write_in_place_writes_into_copies(monkeypatch, tmp_path):
    found, _, _ = trained("adamw", torch.float32)
    asked: list[Any] = []
    monkeypatch.setattr(lowerings, "_may_be_written", lambda *given: bool(asked.append(given)))
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path / "cache"))
    copied, _, _ = trained("adamw", torch.float32)
    assert len(asked) == 4 * len(SIZES)
    assert all(map(same_bits, found, copied))


def test_updates_write_in_place(monkeypatch, tmp_path):
    theirs, answers = lowerings._may_be_written, list[bool]()
    monkeypatch.setattr(
        lowerings, "_may_be_written", lambda *given: answers.append(theirs(*given)) or answers[-1]
    )
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path / "cache"))
    trained("adamw", torch.float32, 1)
    assert len(answers) == 4 * len(SIZES)
    assert all(answers)


@pytest.mark.long
def test_threads_share_large_updates():
    found, _, _ = trained("adamw", torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared, _, _ = trained("adamw", torch.float32)
    finally:
        torch.set_num_threads(before)
    assert all(map(same_bits, found, shared))
