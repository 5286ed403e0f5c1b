"""`exact` on parameters of all sorts: sizes, strides, types, and optimizers of one's own, beside plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import monograph as mg
from tests.backends.test_exact import bits

PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "no dimension": lambda: torch.tensor(0.7),
    "one element": lambda: torch.tensor([0.7]),
    "no element": lambda: torch.zeros(0, 5),
    "transposed": lambda: torch.randn(5, 6).t(),
    "with gaps": lambda: torch.randn(6, 10)[:, ::2],
    "float64": lambda: torch.randn(6, 5, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(6, 5, dtype=torch.bfloat16),
    "expanded": lambda: torch.randn(1, 5),
}


class Model(nn.Module):
    """A layer, a convolution with filters that lie channels last, and another parameter."""

    def __init__(self, extra: Tensor | None, *, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 5), nn.Linear(6, 5)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.extra = None if extra is None else nn.Parameter(extra)
        if frozen:
            self.linear.weight.requires_grad_(False)
        if tied:
            self.other.weight = self.linear.weight

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        y = self.linear(x) + self.other(x)
        if self.extra is not None:
            extra = self.extra.to(torch.float32)
            y = y * extra.sum() if extra.numel() < 2 else y + x @ extra if len(extra) == 6 else y + extra
        images: Tensor = self.convolution(image).relu().mean((1, 2, 3))
        return y.tanh().sum(1) + images


class Own(Optimizer):
    """A formula that torch does not have."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                state["mean"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                change = (p.grad / (state["mean"].sqrt() + 1e-3)).clamp(-1, 1)
                p.sub_(change * group["lr"] / state["count"] ** 0.5)
                p.copy_(torch.where(p.abs() < 1e-4, torch.zeros_like(p), p))


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "own": Own,
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Step(mg.Graph):
    """The step in question; some clip gradients."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, clipped: bool) -> None:
        super().__init__()
        self.model, self.clipped = model, clipped
        self.add_optimizer(optimizer)

    def build(self, x: Tensor, image: Tensor, target: Tensor) -> Tensor:
        return step(self.model, x, image, target, clipped=self.clipped)


def step(model: nn.Module, x: Tensor, image: Tensor, target: Tensor, *, clipped: bool) -> Tensor:
    """Forward and backward."""
    loss = ((model(x, image) - target) ** 2).mean()
    loss.backward()
    if clipped:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss


def check(
    model: nn.Module, make: Callable[[Iterable[Tensor]], Optimizer], *, clipped: bool = False
) -> mg.Graph:
    """Four steps by plain PyTorch and by a graph, one of them with huge numbers."""
    plain = copy.deepcopy(model)
    optimizer, ours = make(plain.parameters()), make(model.parameters())
    graph = Step(model, ours, clipped=clipped)
    graph.config.backend("exact")
    source = torch.Generator().manual_seed(3)
    for number in range(4):
        batch = [torch.randn(shape, generator=source) for shape in ((7, 6), (7, 3, 5, 5), (7,))]
        if number == 2:
            batch[0][0, 0] = 1e20
        optimizer.zero_grad()
        expected = step(plain, *batch, clipped=clipped).detach()  # type: ignore[arg-type]
        optimizer.step()
        assert same(expected, graph(*batch))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(one, other)
        for name, item in optimizer.state[one].items():
            assert not isinstance(item, Tensor) or same(item, ours.state[other][name]), name
    return graph


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits, but for the payload of NaN."""
    one, other = one.detach().float(), other.detach().float()
    return bits(one.nan_to_num(7e7)) == bits(other.nan_to_num(7e7)) and torch.equal(
        one.isnan(), other.isnan()
    )


SOME = list(zip(PARAMETERS, OPTIMIZERS, strict=True))


@pytest.mark.parametrize(
    ("parameter", "optimizer"),
    [
        pytest.param(*pair, marks=() if pair in SOME else pytest.mark.long)
        for pair in product(PARAMETERS, OPTIMIZERS)
    ],
)
def test_parameters_of_all_sorts(parameter: str, optimizer: str) -> None:
    torch.manual_seed(0)
    graph = check(Model(PARAMETERS[parameter]()), OPTIMIZERS[optimizer])
    assert graph.backend == "exact"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "own"])
def test_frozen_tied_and_clipped(optimizer: str) -> None:
    torch.manual_seed(0)
    check(Model(None, frozen=True, tied=True), OPTIMIZERS[optimizer], clipped=True)
