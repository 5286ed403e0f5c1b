"""One step on both sides, eager and as a graph, for the traps of capturing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import monograph as mg
from tests.support import assert_same
from tests.support.steps import detached, graph, linear, sgd


class Plain:
    """The reference: the same build(), run by plain PyTorch."""

    def __init__(self, build: Callable[..., Any], optimizer: torch.optim.Optimizer | None) -> None:
        self.build, self.optimizer = build, optimizer

    def __call__(self, *args: Any) -> Any:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        result = self.build(self, *args)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return result


def inputs(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def compare(
    build: Callable[..., Any],
    make: Callable[[], nn.Module] = linear,
    *,
    calls: Callable[[], list[Any]] = lambda: inputs(3, 5, 4),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = sgd,
    builds: int = 1,
    look: Callable[[nn.Module], Any] = lambda _model: None,
    **attributes: Any,
) -> mg.Graph:
    """Run plain PyTorch and a graph over the same calls; everything must be the same bits."""
    trails: list[list[Any]] = []
    for kind in (Plain, graph):
        torch.manual_seed(0)
        model = make()
        optim = optimizer(model) if optimizer is not None else None
        if kind is Plain:
            step: Any = Plain(build, optim)
            for name, value in attributes.items():
                setattr(step, name, value() if callable(value) else value)
        else:
            step = graph(build, **{k: v() if callable(v) else v for k, v in attributes.items()})
        step.model = model
        if optim is not None and kind is not Plain:
            step.add_optimizer(optim)
        trail = []
        for seed, call in enumerate(calls()):
            args = call if isinstance(call, tuple) else (call,)
            torch.manual_seed(seed)
            result = step(*args)
            trail.append(
                {
                    "result": detached(result),
                    "arguments": detached(list(args)),
                    "model": {name: t.clone() for name, t in model.state_dict().items()},
                    "look": detached(look(model)),
                    "rng": torch.get_rng_state(),
                }
            )
        trails.append(trail)
    assert_same(*trails, "call")
    assert len(step.builds) == builds, [build.reason for build in step.builds]
    assert not fakes_in(step)
    return step


def fakes_in(*roots: Any) -> list[str]:
    """Where fake tensors are left behind in modules, lists, dicts and objects that can be reached."""
    found, seen = [], set()
    pending: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    while pending:
        path, item = pending.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, type)):
            continue
        seen.add(id(item))
        if isinstance(item, FakeTensor):
            found.append(path)
        elif isinstance(item, dict):
            pending += [(f"{path}[{key!r}]", value) for key, value in item.items()]
        elif isinstance(item, (list, tuple, set, deque)):
            pending += [(f"{path}[{index}]", value) for index, value in enumerate(item)]
        elif isinstance(item, (nn.Module, mg.Graph, Holder, SimpleNamespace)):
            pending += [(f"{path}.{name}", value) for name, value in vars(item).items() if name != "_cache"]
        elif isinstance(item, torch.Tensor) and item.grad is not None:
            pending.append((f"{path}.grad", item.grad))
    return found


class Holder:
    """A plain object."""


def train(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss = self.model(x).square().mean()
    loss.backward()
    return loss


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.model(x)


def item(x: torch.Tensor) -> Any:
    return x if x.sum().item() > 0 else -x  # at: item


def seed_here(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x * torch.rand(2)
