"""A step on two sides, plain PyTorch and a Graph, and what is changed between its calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import monograph as mg
from tests.support import assert_same, says_nothing
from tests.support.steps import detached


class Plain:
    """The reference: the same body, run by plain PyTorch."""

    def __init__(self, body: Callable[..., Any], optimizers: list[torch.optim.Optimizer]) -> None:
        self.body, self.optimizers = body, optimizers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        result = self.body(self, *args, **kwargs)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return result

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)


@dataclass
class World:
    """One side: the step that is called, and what it is made of."""

    step: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    kept: dict[str, Any] = field(default_factory=dict)  # what a change must remember to go back

    def state(self) -> dict[str, Any]:
        optimizers = [self.optimizer, *self.kept.get("optimizers", ())]
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "attributes": [
                value.clone()
                for module in self.model.modules()
                for value in vars(module).values()
                if isinstance(value, torch.Tensor)
            ],
            "optimizers": [
                [
                    {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in entries.items()}
                    for entries in optimizer.state.values()
                ]
                for optimizer in optimizers
                if optimizer is not None
            ],
            "rng": torch.get_rng_state(),
        }


class Activated(nn.Module):
    """A layer of every kind that a fact can hang on."""

    gain = 1.5  # a class attribute

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)
        self.act = functional.relu
        self.register_buffer("shift", torch.full((6,), 0.25))
        self.scale = torch.full((6,), 1.25)  # a tensor that is neither parameter nor buffer
        self.depth = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.fc(x)) * self.scale + self.shift
        for _ in range(self.depth):
            hidden = self.act(hidden)
        return self.head(self.dropout(hidden)) * self.gain


class Loss:
    """A loss that is a plain Python object."""

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out, y) * self.alpha


def train(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.loss(self.model(x), y) * self.alpha
    loss.backward()
    return loss


def infer(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.model(x)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def make_world(
    graph: bool,
    body: Callable[..., Any] = train,
    *,
    model: Callable[[], nn.Module] = Activated,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = plain_sgd,
    parts: Callable[[], dict[str, Any]] = dict,
) -> World:
    torch.manual_seed(0)
    net = model()
    optim = optimizer(net) if optimizer is not None else None
    if graph:
        step: Any = type("Step", (mg.Graph,), {"build": body})()
    else:
        step = Plain(body, [])
    step.model, step.loss, step.alpha = net, Loss(), 1.0
    for name, value in parts().items():
        setattr(step, name, value)
    if optim is not None:
        step.add_optimizer(optim)
    return World(step, net, optim)


def batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


Args = Callable[[World], tuple[Any, ...]]


def default_args(_world: World) -> tuple[Any, ...]:
    return batch()


@dataclass
class Case:
    """One fact: how to change it, how to change it back, and how many builds that takes."""

    change: Callable[[World], Any]
    reason: str = ""  # a part of the reason of the last build
    builds: int = 2
    back: Callable[[World], Any] | None = None
    builds_back: int | None = None  # as before, if not given
    body: Callable[..., Any] = train
    options: dict[str, Any] = field(default_factory=dict)
    args: Args = default_args
    inside: Callable[[], Any] | None = None  # a context around the calls after the change


def play(case: Case, world: World) -> list[Any]:
    """Call, change, call twice, go back, call twice; the results and states after each."""
    trail: list[Any] = []

    def call(seed: int, context: Any) -> None:
        torch.manual_seed(seed)
        args = case.args(world)
        with context:
            result = world.step(*args)
        gradients = [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]
        trail.append({"result": detached(result), "gradients": gradients, **world.state()})
        trail.append(len(world.step.builds) if isinstance(world.step, mg.Graph) else None)
        if isinstance(world.step, mg.Graph):
            world.kept["reason"] = world.step.builds[-1].reason

    call(1, nullcontext())
    torch.manual_seed(100)
    case.change(world)
    for seed in (2, 3):
        call(seed, case.inside() if case.inside else nullcontext())
    world.kept["reason of the change"] = world.kept.get("reason")
    if case.back is not None:
        torch.manual_seed(200)
        case.back(world)
        for seed in (4, 5):
            call(seed, nullcontext())
    return trail


def check(case: Case) -> World:
    expected = play(case, make_world(False, case.body, **case.options))
    world = make_world(True, case.body, **case.options)
    got = play(case, world)
    assert_same(expected[::2], got[::2], "call")
    builds = [1, case.builds, case.builds]
    if case.back is not None:
        builds += [case.builds_back or case.builds] * 2
    reasons = [build.reason for build in world.step.builds]
    assert got[1::2] == builds, f"builds after each call; reasons: {reasons}"
    assert not any(map(says_nothing, reasons)), reasons
    assert case.reason in world.kept["reason of the change"], reasons
    return world


def set_to(path: str, value: Any) -> Callable[[World], None]:
    """Set `model.fc.x` or `step.x` to a value, or to what `value(world)` gives if it is a factory marked so."""

    def change(world: World) -> None:
        owner: Any = world
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        world.kept.setdefault(path, getattr(owner, name, None))
        setattr(owner, name, value() if isinstance(value, Fresh) else value)

    return change


class Fresh:
    """A value that each side makes anew."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def put_back(path: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        set_to(path, world.kept[path])(world)

    return change


def swap_data(world: World) -> None:
    """EMA weights swapped in by `p.data`, and out again by the same call."""
    shadow = world.kept.setdefault(
        "shadow", [torch.randn_like(parameter) for parameter in world.model.parameters()]
    )
    for index, parameter in enumerate(world.model.parameters()):
        parameter.data, shadow[index] = shadow[index], parameter.data
