"""Planned bytes against what torch's allocator counts in real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import monograph as mg
from monograph.errors import PlanError
from monograph.plan.check import check_plan
from monograph.plan.plan import Plan, make_plan


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.mixed(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.last(x))))


class Language(nn.Module):
    def __init__(self, words: int = 200, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(2)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(x) + self.places.weight)).flatten(0, 1)


def mlp() -> tuple[nn.Module, Any, Any]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64), torch.randint(10, (64,))


def language() -> tuple[nn.Module, Any, Any]:
    return Language(), torch.randint(200, (4, 32)), torch.randint(200, (128,))


def convolutions() -> tuple[nn.Module, Any, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    for _ in range(4):
        layers += [nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.ReLU6()]
        layers += [nn.Conv2d(24, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return model, torch.randn(8, 3, 16, 16), torch.randint(10, (8,))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most bytes that are allocated at once while `run` runs, over those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("make", "optimizer", "off_by"),
    [(mlp, adamw, 0.02), (language, adamw, 0.02), (convolutions, momentum, 0.05)],
    ids=["mlp", "language", "convolutions"],
)
def test_the_peak_is_what_the_allocator_counts(make, optimizer, off_by):
    torch.manual_seed(0)
    model, x, y = make()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer(model))
    step.config.backend("aten")
    if (
        make is convolutions
    ):  # whose kernels make copies in a layout of their own, a large part of what is left otherwise
        step.config.enable_straighten_algorithm("SpeedFirst")
    step(x, y)
    peak = allocated_peak(lambda: step(x, y))
    plan = step.builds[0].memory
    assert plan.peak_bytes == pytest.approx(peak, rel=off_by)
    assert sum(holder.nbytes for holder in plan.holders) == plan.peak_bytes


def planned(*, accumulate: int = 1) -> tuple[mg.Graph, Plan]:
    """A step of an MLP, and its plan."""
    torch.manual_seed(0)
    model, x, y = mlp()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), adamw(model))
    step.config.set_gradient_accumulation_steps(accumulate)
    step(x, y)
    return step, make_plan(step.builds[0].program)


def test_what_the_caller_holds_is_counted_apart():
    step, plan = planned()
    memory, model = plan.memory, step.model.to(nn.Module)
    held = sum(tensor.nbytes for tensor in model.parameters())
    moments = 2 * held + 4 * len(list(model.parameters()))
    assert memory.state_bytes == held + moments
    assert memory.argument_bytes == 64 * 64 * 4 + 64 * 8
    with pytest.raises(PlanError, match="the inputs hold"):
        check_plan(replace(plan, memory=replace(memory, state_bytes=held)))


def test_holders_say_what_they_are_and_where_they_come_from():
    holders = planned()[1].memory.holders
    assert {holder.kind for holder in holders} == {"result", "state", "temporary"}
    sizes = [holder.nbytes for holder in holders]
    assert sizes == sorted(sizes, reverse=True)
    assert {holder.origin.phase for holder in holders} >= {"forward", "update"}


def test_what_a_part_holds_inside_belongs_to_the_peak():
    step, plan = planned(accumulate=4)
    memory = plan.memory
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    peak = allocated_peak(lambda: step(x, y))
    assert step.builds[0].memory.peak_bytes == pytest.approx(peak, rel=0.02)
    (inside,) = [holder for holder in memory.holders if holder.kind == "inside"]
    assert inside.node == memory.peak_node
    with pytest.raises(PlanError, match="are held at once"):
        check_plan(replace(plan, memory=replace(memory, peak_bytes=memory.peak_bytes - 1)))
