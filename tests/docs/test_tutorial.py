"""The tutorial trains to eager's bits, needs nothing of Monograph, and its page has all of its code."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pages import blocks_of, docs

FILE = docs("tutorial/mini.py")
MINI: dict[str, Any] = runpy.run_path(str(FILE))


class Views(nn.Module):
    """Writes to views, and reads views of what is written to later."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(x).clone()
        column, row = hidden[:, 1], hidden[0]
        hidden[:, 0] += 1
        hidden[2:4].mul_(2)
        row.add_(column[5])
        return self.head(hidden.t().sigmoid_().t()) + column.unsqueeze(1)


class Shared(nn.Module):
    """One weight in two places, and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(self.first(x).relu_(), self.first.weight)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.head(hidden - self.mean)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))


BATCHES = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(6)]


def trained(
    make: Callable[[], nn.Module], wrap: Callable[..., Any], **options: Any
) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    step = wrap(MINI["train_step"], model, optimizer)
    losses = [step(x, y) for x, y in BATCHES]
    return step, [*losses, *model.state_dict().values(), torch.rand(2)]


def eagerly(build: Callable[..., Any], *owned: Any) -> Callable[..., Any]:
    return lambda *args: build(*owned, *args)


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=["plain", "nesterov"])
@pytest.mark.parametrize("make", [small, Views, Shared])
def test_replay_has_the_bits_of_eager_mode(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    _, expected = trained(make, eagerly, **options)
    step, got = trained(make, MINI["Step"], **options)
    assert all(map(torch.equal, expected, got))
    (program,) = step.programs.values()
    assert not any(op.target._schema.is_mutable for op in program.ops)


def test_what_is_not_read_is_dropped() -> None:
    model, optimizer = MINI["make"]()
    MINI["train_step"](model, optimizer, *BATCHES[0])
    captured = MINI["capture"](MINI["train_step"], model, optimizer, BATCHES[0])
    simpler = MINI["drop_unread"](captured)
    assert len(simpler.ops) < len(captured.ops)
    assert len(simpler.ops) == len(MINI["drop_unread"](simpler).ops)


def test_a_change_leads_to_another_program() -> None:
    model, optimizer = MINI["make"]()
    step = MINI["Step"](MINI["train_step"], model, optimizer)
    for _ in range(3):
        step(*BATCHES[0])
    assert len(step.programs) == 1
    optimizer.param_groups[0]["lr"] = 0.01
    step(*BATCHES[0])
    assert len(step.programs) == 2
    model.eval()
    step(*BATCHES[0])
    assert len(step.programs) == 3


def test_the_value_of_a_tensor_is_no_constant() -> None:
    model, optimizer = MINI["make"]()
    step = MINI["Step"](lambda model, optimizer, x, y: model(x).sum().item(), model, optimizer)
    step(*BATCHES[0])
    with pytest.raises(RuntimeError, match="asks for the value of a tensor"):
        step(*BATCHES[0])


def test_it_needs_torch_alone() -> None:
    imported = set(re.findall(r"^(?:from|import) (\w+)", FILE.read_text(), re.MULTILINE))
    assert imported == {"copy", "collections", "dataclasses", "typing", "torch"}


def test_the_page_has_the_file_and_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = blocks_of(docs("tutorial/mini.md"))
    lines = [line for block in blocks for line in block.code.splitlines() if line]
    assert lines == [line for line in FILE.read_text().splitlines() if line]
    MINI["main"]()
    assert [block.output for block in blocks if block.output] == [capsys.readouterr().out]
