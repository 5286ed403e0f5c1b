"""A small model, its batches, and the comparison of a graph with the plain loop after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg
from tests.support import Side, assert_same, train_eagerly

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(nn.Module):
    """Parameters of one and of two dimensions, buffers of a float and of an integer kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.tokens(tokens).mean(1))


class Matrices(nn.Module):
    """Only parameters of two dimensions; one is tall, one is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.wide = nn.Linear(4, 6, bias=False)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.tokens(tokens).mean(1)).tanh())


class PartlyTrained(nn.Module):
    """A classifier with a frozen parameter, and one that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier()
        self.classifier.layers[0].weight.requires_grad_(False)
        self.unused = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.classifier(tokens)


class WithScale(Classifier):
    """A classifier with a parameter of no dimension, and one of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale + self.nothing.sum()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Ops of a few numbers are slower on several threads, the more so beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(count: int = 6) -> list[Batch]:
    """The same batches for both sides."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(11, (5, 3), generator=generator), torch.randint(3, (5,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens), target)


class TrainStep(mg.Graph):
    """The step of `train_eagerly` with `loss_of`, as a graph."""

    def __init__(self, side: Side, *, scheduler_in_graph: bool = True) -> None:
        super().__init__()
        self.model = side.model
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler if scheduler_in_graph else None)

    def build(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens, target)
        loss.backward()
        return loss


def shrinking(optimizer: Optimizer) -> LambdaLR:
    """Another learning rate at each step."""
    return LambdaLR(optimizer, lambda step: 0.8**step)


def make_side(
    optimizer: Callable[[nn.Module], Optimizer],
    scheduler: Callable[[Optimizer], Any] | None = shrinking,
    model: type[nn.Module] = Classifier,
) -> Side:
    """A side that starts from the same numbers each time."""
    torch.manual_seed(0)
    made = model()
    held = optimizer(made)
    return Side(made, held, None if scheduler is None else scheduler(held))


def record(side: Side, loss: torch.Tensor) -> dict[str, Any]:
    """All that a step leaves behind, with every entry of the param groups."""
    return {
        "loss": loss.detach().clone(),
        **side.state(),
        "state_dict": copy.deepcopy(side.optimizer.state_dict()),
    }


def eager_trail(
    side: Side, steps: Iterable[Batch], between: Callable[[int, Side], None] | None = None
) -> list[dict[str, Any]]:
    """What the plain loop leaves behind after each step; `between` runs after the record is taken."""
    trail: list[dict[str, Any]] = []

    def after(index: int, loss: torch.Tensor) -> None:
        trail.append(record(side, loss))
        if between is not None:
            between(index, side)

    train_eagerly(side, loss_of, steps, after)
    return trail


def graph_trail(
    side: Side, step: mg.Graph, steps: Iterable[Batch], between: Callable[[int, Side], None] | None = None
) -> list[dict[str, Any]]:
    """What the graph leaves behind after each step."""
    trail = []
    for index, batch in enumerate(steps):
        trail.append(record(side, step(*batch)))
        if between is not None:
            between(index, side)
    return trail


def check_parity(
    make: Callable[[], Side],
    *,
    builds: int = 1,
    steps: int = 6,
    between: Callable[[int, Side], None] | None = None,
) -> mg.Graph:
    """Train both sides, compare them after every step, and count the builds."""
    expected = eager_trail(make(), batches(steps), between)
    side = make()
    step = TrainStep(side)
    assert_same(expected, graph_trail(side, step, batches(steps), between), "step")
    assert len(step.builds) == builds, step.explain()
    return step
