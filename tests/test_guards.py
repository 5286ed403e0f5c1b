"""Stale replay: every fact that a build stands on is changed after the first call, and eager is the judge."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as module_hooks

import monograph as mg
from tests.support import assert_same, says_nothing

# --- two sides of one step: plain PyTorch, and a Graph -----------------------------------------------------------


optimizer_hooks = importlib.import_module("torch.optim.optimizer")  # torch deletes the name from torch.optim


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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


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


def detached(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, (list, tuple)):
        return [detached(entry) for entry in item]
    return item


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


# --- facts of modules ----------------------------------------------------------------------------------------------


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


def freeze(name: str, flag: bool) -> Callable[[World], None]:
    return lambda world: getattr(world.model, name).requires_grad_(flag)


def replace_forward(world: World) -> None:
    fc = world.model.fc
    fc.forward = lambda x: functional.linear(x, fc.weight * 2, fc.bias)


def restore_forward(world: World) -> None:
    del world.model.fc.forward


def tanh_twice(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x))


def replace_parameter(world: World) -> None:
    world.model.head.weight = nn.Parameter(torch.randn(3, 6))
    groups = world.optimizer.param_groups
    old = groups[0]["params"][2]
    groups[0]["params"][2] = world.model.head.weight
    world.optimizer.state.pop(old, None)


def replace_submodule(world: World) -> None:
    world.model.head = nn.Linear(6, 3)
    world.optimizer.param_groups[0]["params"][2:] = list(world.model.head.parameters())
    for old in list(world.optimizer.state)[2:]:
        del world.optimizer.state[old]


def swap_data(world: World) -> None:
    """EMA weights swapped in by `p.data`, and out again by the same call."""
    shadow = world.kept.setdefault(
        "shadow", [torch.randn_like(parameter) for parameter in world.model.parameters()]
    )
    for index, parameter in enumerate(world.model.parameters()):
        parameter.data, shadow[index] = shadow[index], parameter.data


def new_storage(world: World) -> None:
    world.model.fc.weight.data = world.model.fc.weight.data + 1.0


def lose_statistics(world: World) -> None:
    world.model.norm.running_mean = world.model.norm.running_var = None


def to_double(world: World) -> None:
    world.model.double()
    world.model.scale = world.model.scale.double()


MODULE_FACTS = {
    "eval mode of the whole model": Case(
        lambda w: w.model.eval(), "training changed from True to False", back=lambda w: w.model.train()
    ),
    "eval mode of one submodule": Case(
        lambda w: w.model.dropout.eval(), "model.dropout.training", back=lambda w: w.model.dropout.train()
    ),
    "dropout.p": Case(
        set_to("model.dropout.p", 0.9),
        "model.dropout.p changed from 0.3 to 0.9",
        back=put_back("model.dropout.p"),
    ),
    "eps of a norm": Case(set_to("model.norm.eps", 0.1), "model.norm.eps", back=put_back("model.norm.eps")),
    "momentum of a norm": Case(
        set_to("model.norm.momentum", 0.5), "model.norm.momentum", back=put_back("model.norm.momentum")
    ),
    "an int attribute": Case(set_to("model.depth", 3), "model.depth", back=put_back("model.depth")),
    "a class attribute, set on the instance": Case(
        set_to("model.gain", 0.5), "gain", back=lambda w: delattr(w.model, "gain")
    ),
    "an activation function": Case(set_to("model.act", tanh_twice), "model.act", back=put_back("model.act")),
    "forward of a submodule": Case(replace_forward, "forward", back=restore_forward),
    "a submodule": Case(replace_submodule, "model.head"),
    "a parameter": Case(replace_parameter, "model.head.weight"),
    "a buffer": Case(
        set_to("model.shift", Fresh(lambda: torch.randn(6))), back=put_back("model.shift"), builds=1
    ),
    "a buffer of another shape": Case(
        set_to("model.shift", Fresh(lambda: torch.randn(1))),
        "shape of model.shift changed from (6,) to (1,)",
        back=put_back("model.shift"),
        builds_back=3,  # builds on tensors that are no longer the state are not kept
    ),
    "a buffer set to None": Case(lose_statistics, "model.norm.running_mean"),
    "a plain tensor attribute": Case(
        set_to("model.scale", Fresh(lambda: torch.randn(6))), back=put_back("model.scale"), builds=1
    ),
    "an attribute that was not read": Case(set_to("model.comment", "new"), builds=1),
    "an attribute set to an equal value": Case(set_to("model.dropout.p", Fresh(lambda: 3 / 10)), builds=1),
    "frozen layer": Case(freeze("fc", False), "requires_grad of model.fc.weight", back=freeze("fc", True)),
    "double": Case(to_double, "float64", args=lambda w: (batch()[0].to(w.model.fc.weight.dtype), batch()[1])),
    "bfloat16 of one layer": Case(
        lambda w: w.model.head.to(torch.bfloat16),
        "dtype of model.head.weight",
        options={"parts": lambda: {"loss": lambda out, y: functional.cross_entropy(out.float(), y)}},
        body=lambda self, x, y: autocast_train(self, x, y),
    ),
    "storage of a parameter": Case(new_storage, builds=1),
    "storage of every parameter and back": Case(swap_data, back=swap_data, builds=1),
    "storage of a buffer": Case(lambda w: setattr(w.model.shift, "data", torch.randn(6)), builds=1),
    "load_state_dict in place": Case(
        lambda w: w.model.load_state_dict({k: v * 2 for k, v in w.model.state_dict().items()}), builds=1
    ),
    "load_state_dict(assign=True)": Case(
        lambda w: w.model.load_state_dict(
            {k: (v * 2).clone() for k, v in w.model.state_dict().items()}, assign=True
        ),
        builds=1,
        body=infer,
        options={"optimizer": None},
    ),
    "parameters changed in place by plain torch": Case(
        lambda w: [p.data.mul_(1.5) for p in w.model.parameters()], builds=1
    ),
    "channels of a weight relaid": Case(
        lambda w: setattr(w.model.head.weight, "data", w.model.head.weight.data.t().contiguous().t()),
        "model.head.weight",
    ),
}


def autocast_train(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = self.model.norm(self.model.fc(x))
    loss = self.loss(self.model.head(hidden.to(self.model.head.weight.dtype)), y)
    loss.backward()
    return loss


@pytest.mark.parametrize("name", MODULE_FACTS)
def test_facts_of_modules(name):
    check(MODULE_FACTS[name])


def test_a_half_model_in_inference():
    check(
        Case(
            lambda w: w.model.half(),
            "float16",
            back=lambda w: w.model.float(),
            body=lambda self, x: self.model(x),
            options={"model": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "optimizer": None},
            args=lambda w: (batch()[0].to(w.model[0].weight.dtype),),
        )
    )


# --- facts that hang on classes, methods, absent attributes and containers --------------------------------------------


def with_class_attribute() -> nn.Module:
    class Gained(nn.Module):
        gain = 2.0
        _bias = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.helper(self.fc(x)) * self.gain + self._bias

        def helper(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    return Gained()


def set_on_class(name: str, value: Any) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.kept.setdefault(name, getattr(type(world.model), name))
        setattr(type(world.model), name, value)

    return change


def class_back(name: str) -> Callable[[World], None]:
    return lambda world: setattr(type(world.model), name, world.kept[name])


class MaybeMasked(nn.Module):
    """Reads attributes that are not there, and containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.weights = {"a": 2.0, "b": 1.0}
        self.powers = [1, 2]
        self.tags = {"square"}
        self.config = SimpleNamespace(bias=0.5, inner=SimpleNamespace(factor=2.0))
        self.terms = Loss(3.0)
        self.tensors = [torch.ones(3), torch.zeros(3)]
        self.array, self.live = np.array([1.0, 2.0]), np.ones(3, dtype="float32")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x) * self.weights["a"] + self.config.bias * self.config.inner.factor
        for power in self.powers:
            out = out + out**power
        if "square" in self.tags:
            out = out * out
        out = out * self.terms.alpha * self.tensors[0] + self.tensors[1]
        out = out * float(self.array[0]) * torch.from_numpy(self.live)
        mask = getattr(self, "mask", None)
        if mask is not None:
            out = out * mask
        if hasattr(self, "double_it"):
            out = out * 2
        return out


def _edit(world: World, what: Callable[[Any], Any]) -> None:
    what(world.model)


HIDDEN_FACTS = {
    "a class attribute": Case(
        set_on_class("gain", 3.0), "gain", back=class_back("gain"), options={"model": with_class_attribute}
    ),
    "a private class attribute": Case(
        set_on_class("_bias", 3.0), "_bias", back=class_back("_bias"), options={"model": with_class_attribute}
    ),
    "a method, on the class": Case(
        set_on_class("helper", lambda self, x: x.cos()),
        "helper",
        back=class_back("helper"),
        options={"model": with_class_attribute},
    ),
    "a method, on the instance": Case(
        lambda w: setattr(w.model, "helper", torch.cos),
        "helper",
        back=lambda w: delattr(w.model, "helper"),
        options={"model": with_class_attribute},
    ),
    "forward, on the class": Case(
        set_on_class("forward", lambda self, x: self.fc(x)),
        "forward",
        back=class_back("forward"),
        options={"model": with_class_attribute},
    ),
    "an attribute that getattr() did not find": Case(
        lambda w: setattr(w.model, "mask", torch.tensor([0.0, 1.0, 2.0])),
        "mask",
        back=lambda w: delattr(w.model, "mask"),
        options={"model": MaybeMasked},
    ),
    "an attribute that hasattr() did not find": Case(
        lambda w: setattr(w.model, "double_it", True),
        "double_it",
        back=lambda w: delattr(w.model, "double_it"),
        options={"model": MaybeMasked},
    ),
    "an entry of a dict attribute": Case(
        lambda w: w.model.weights.update(a=5.0),
        "weights",
        back=lambda w: w.model.weights.update(a=2.0),
        options={"model": MaybeMasked},
    ),
    "an item of a list attribute": Case(
        lambda w: w.model.powers.append(3),
        "powers",
        back=lambda w: w.model.powers.pop(),
        options={"model": MaybeMasked},
    ),
    "an item of a set attribute": Case(
        lambda w: w.model.tags.clear(),
        "tags",
        back=lambda w: w.model.tags.add("square"),
        options={"model": MaybeMasked},
    ),
    "a tensor in a list attribute": Case(
        lambda w: w.model.tensors.__setitem__(0, torch.full((3,), 4.0)),
        "tensors",
        options={"model": MaybeMasked},
    ),
    "a tensor in a list attribute, in place": Case(
        lambda w: w.model.tensors[0].fill_(4.0), builds=1, options={"model": MaybeMasked}
    ),
    "a value in a numpy array": Case(
        lambda w: w.model.array.__setitem__(0, 5.0),
        "array",
        back=lambda w: w.model.array.__setitem__(0, 1.0),
        options={"model": MaybeMasked},
    ),
    "a value in a numpy array that a tensor shows": Case(
        lambda w: w.model.live.__setitem__(0, 5.0), builds=1, options={"model": MaybeMasked}
    ),
    "a numpy array": Case(
        lambda w: setattr(w.model, "array", np.array([3.0, 4.0])), "array", options={"model": MaybeMasked}
    ),
    "a namespace held by a module": Case(
        lambda w: setattr(w.model.config, "bias", 2.5),
        "bias",
        back=lambda w: setattr(w.model.config, "bias", 0.5),
        options={"model": MaybeMasked},
    ),
    "a namespace in a namespace": Case(
        lambda w: setattr(w.model.config.inner, "factor", 7.0),
        "factor",
        back=lambda w: setattr(w.model.config.inner, "factor", 2.0),
        options={"model": MaybeMasked},
    ),
    "an object held by a module": Case(
        lambda w: setattr(w.model.terms, "alpha", 1.0),
        "alpha",
        back=lambda w: setattr(w.model.terms, "alpha", 3.0),
        options={"model": MaybeMasked},
    ),
}


@pytest.mark.parametrize("name", HIDDEN_FACTS)
def test_facts_that_hide(name):
    check(HIDDEN_FACTS[name])


# --- facts of the graph and of what it holds ----------------------------------------------------------------------------


class Slotted:
    """A loss whose attributes are slots."""

    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 0.5

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out, y) * self.alpha


class Weighted:
    """A loss with nothing but a tensor."""

    def __init__(self) -> None:
        self.weight = torch.tensor([1.0, 2.0, 3.0])

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out, y, weight=self.weight)


class Perceptual:
    """A plain object that holds a module which the graph does not know."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        for parameter in self.net.parameters():
            parameter.requires_grad_(False)

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(out).square().mean()


def two_losses(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.first(self.model(x), y) + self.second(self.model(x), y)
    loss.backward()
    return loss


def by_items(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.loss(self.model(x), y) * self.weights[0] * self.settings["scale"]
    loss.backward()
    return loss


def optional_part(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.loss(self.model(x), y)
    if getattr(self, "penalty", None) is not None:
        loss = loss + self.penalty * self.model.fc.weight.square().sum()
    loss.backward()
    return loss


def other_model(world: World) -> None:
    world.kept["model"] = world.model
    world.model = Activated()
    world.step.model = world.model


def model_back(world: World) -> None:
    world.model, world.kept["model"] = world.kept["model"], world.model
    world.step.model = world.model


GRAPH_FACTS = {
    "alpha of the graph": Case(
        set_to("step.alpha", 2.0), "alpha changed from 1.0 to 2.0", back=put_back("step.alpha")
    ),
    "alpha of a plain loss": Case(set_to("step.loss.alpha", 2.0), "alpha", back=put_back("step.loss.alpha")),
    "alpha of a loss with slots": Case(
        set_to("step.loss.alpha", 2.0),
        "alpha",
        back=put_back("step.loss.alpha"),
        options={"parts": lambda: {"loss": Slotted()}},
    ),
    "the weight tensor of a plain loss": Case(
        set_to("step.loss.weight", Fresh(lambda: torch.tensor([3.0, 2.0, 1.0]))),
        "weight",
        options={"parts": lambda: {"loss": Weighted()}},
    ),
    "the loss object": Case(
        set_to("step.loss", Fresh(lambda: Loss(3.0))), "loss", back=put_back("step.loss")
    ),
    "the loss function": Case(
        set_to("step.loss", functional.multi_margin_loss),
        "loss",
        back=put_back("step.loss"),
        options={"parts": lambda: {"loss": functional.cross_entropy}},
    ),
    "one of two losses of one class": Case(
        set_to("step.first.alpha", 2.0),
        "alpha",
        body=two_losses,
        options={"parts": lambda: {"first": Loss(0.1), "second": Loss(0.7)}},
    ),
    "an item of a list of the graph": Case(
        lambda w: w.step.weights.__setitem__(0, 3.0),
        "weights",
        body=by_items,
        options={"parts": lambda: {"weights": [1.0, 2.0], "settings": {"scale": 1.0}}},
    ),
    "an item of a dict of the graph": Case(
        lambda w: w.step.settings.update(scale=3.0),
        "settings",
        body=by_items,
        options={"parts": lambda: {"weights": [1.0, 2.0], "settings": {"scale": 1.0}}},
    ),
    "an attribute of the graph that was absent": Case(
        set_to("step.penalty", 0.5),
        "penalty",
        back=lambda w: delattr(w.step, "penalty"),
        body=optional_part,
    ),
    "eval mode of a module in a plain object": Case(
        lambda w: w.step.loss.net.eval(),
        "training",
        back=lambda w: w.step.loss.net.train(),
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "a parameter of a module in a plain object": Case(
        lambda w: setattr(w.step.loss.net[0], "weight", nn.Parameter(torch.ones(3, 3), requires_grad=False)),
        "weight",
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "the storage of a module in a plain object": Case(
        lambda w: setattr(w.step.loss.net[0].weight, "data", torch.ones(3, 3)),
        "storage",
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "graph.model is another module": Case(
        other_model, "replaced", back=model_back, builds_back=3, body=infer, options={"optimizer": None}
    ),
}


@pytest.mark.parametrize("name", GRAPH_FACTS)
def test_facts_of_the_graph(name):
    check(GRAPH_FACTS[name])


def test_a_changed_configuration_is_a_new_build():
    world = make_world(True)
    world.step(*batch())
    world.step.config.keep_gradients(True)
    world.step(*batch())
    assert len(world.step.builds) == 2
    assert "configuration" in world.step.builds[-1].reason
    assert world.model.fc.weight.grad is not None
    world.step.config.keep_gradients(False)
    world.step(*batch())
    assert len(world.step.builds) == 2


def test_max_builds_is_no_reason_for_a_build():
    world = make_world(True)
    world.step(*batch())
    world.step.config.max_builds(1)
    world.step(*batch())
    assert len(world.step.builds) == 1
    with pytest.raises(mg.CaptureError, match="argument x"):
        world.step(*batch(rows=7))


# --- modes of torch -------------------------------------------------------------------------------------------------------


def softly(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.model(x) + torch.ones(())


def fill_uninitialised(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.float64).scatter_add(0, y, torch.ones(5, dtype=torch.float64))


class Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_error: object) -> None:
        torch.use_deterministic_algorithms(False)


class DefaultDouble:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_error: object) -> None:
        torch.set_default_dtype(torch.float32)


class NoFastPath:
    def __enter__(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


def in_eval(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.model.eval()
    with torch.no_grad():
        return self.model(x.expand(2, 5, 4))


def nothing(_world: World) -> None:
    pass


def linear_only() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh())


MODES = {
    "no_grad": Case(
        nothing, "grad mode", back=nothing, inside=torch.no_grad, body=infer, options={"optimizer": None}
    ),
    "inference_mode": Case(
        nothing, "grad mode", back=nothing, inside=torch.inference_mode, body=infer,
        options={"optimizer": None, "model": linear_only},
    ),
    "autocast": Case(
        nothing, "autocast", back=nothing, inside=lambda: torch.autocast("cpu", torch.bfloat16)
    ),
    "default dtype": Case(nothing, "default dtype", back=nothing, inside=DefaultDouble, body=lambda self, x, y: torch.ones(3) + x.sum()),
    "kernels of attention": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=lambda: sdpa_kernel(SDPBackend.MATH),
        body=lambda self, x, y: functional.scaled_dot_product_attention(*[x.expand(2, 5, 4)] * 3),
        options={"optimizer": None},
    ),
    "mkldnn": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=lambda: torch.backends.mkldnn.flags(enabled=False),
        body=lambda self, x, y: self.model(x)[0],
        options={"optimizer": None, "model": lambda: nn.LSTM(4, 3)},
    ),
    "fast path of transformers": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=NoFastPath,
        body=in_eval,
        options={"optimizer": None, "model": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)},
    ),
    "deterministic algorithms": Case(nothing, "deterministic", back=nothing, inside=Deterministic),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_modes_around_the_call(name):
    case = MODES[name]
    if name == "default dtype":
        case.options = {"optimizer": None}
    check(case)


def test_grad_mode_counts_where_requires_grad_is_read_without_grad():
    """Under no_grad torch's own tensor guards do not look at requires_grad."""

    def penalty(self: Any) -> torch.Tensor:
        return sum(p.square().sum() for p in self.model.parameters() if p.requires_grad)

    expected = []
    for graph in (False, True):
        world = make_world(graph, penalty, optimizer=None)
        with torch.no_grad():
            first = world.step()
            world.model.fc.requires_grad_(False)
            expected.append((first, world.step()))
    assert_same(expected[0], expected[1])


# --- arguments ------------------------------------------------------------------------------------------------------------


class Reduction(Enum):
    MEAN = "mean"
    SUM = "sum"


class Pair(NamedTuple):
    left: Any
    right: Any


def generator_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def reduce_(self: Any, x: torch.Tensor, how: Any = "mean") -> torch.Tensor:
    name = how.value if isinstance(how, Enum) else how
    return getattr(self.model(x), name if isinstance(name, str) else ("mean", "sum")[name])()


def either(self: Any, x: Any) -> torch.Tensor:
    if isinstance(x, dict):
        return self.model(x["left"]) - x["right"]
    return self.model(x[0]) + x[1]


def maybe(self: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    out = self.model(x)
    return out if mask is None else out * mask


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]], str]] = {
    "dict instead of tuple": (
        either,
        lambda: ((batch()[0], 1.0),),
        lambda: ({"left": batch()[0], "right": 1.0},),
        "argument x is a dict; the graph was built for a tuple",
    ),
    "named tuple instead of tuple": (
        either, lambda: ((batch()[0], 1.0),), lambda: (Pair(batch()[0], 1.0),), "argument x is a Pair",
    ),
    "None instead of a tensor": (maybe, lambda: (batch()[0], torch.ones(3) * 2), lambda: (batch()[0], None), "argument mask"),
    "shape": (infer, lambda: batch(5), lambda: batch(7), "argument x is a tensor (7, 4)"),
    "dtype": (
        lambda self, x: self.model(x.float()), lambda: (batch()[0],), lambda: (batch()[0].double(),), "float64",
    ),
    "strides": (
        infer, batch, lambda: (batch()[0].t().contiguous().t(), batch()[1]), "argument x",
    ),
    "channels last": (
        lambda self, x: torch.ops.aten.view.default(x.permute(0, 2, 3, 1).contiguous(), [-1]) + x.stride(1),
        lambda: (generator_tensor(2, 3, 4, 5),),
        lambda: (generator_tensor(2, 3, 4, 5).to(memory_format=torch.channels_last),),
        "argument x",
    ),
    "expanded": (infer, batch, lambda: (batch()[0][:1].expand(5, 4), batch()[1]), "argument x"),
    "requires_grad": (infer, batch, lambda: (batch()[0].requires_grad_(), batch()[1]), "requires_grad"),
    "a string": (reduce_, lambda: (batch()[0], "mean"), lambda: (batch()[0], "sum"), "'sum'"),
    "an int": (reduce_, lambda: (batch()[0], 0), lambda: (batch()[0], 1), "argument how"),
    "a bool": (reduce_, lambda: (batch()[0], False), lambda: (batch()[0], True), "argument how"),
    "a bool instead of an equal int": (
        lambda self, x, k: x * 2 if k is True else x, lambda: (batch()[0], 1), lambda: (batch()[0], True), "argument k",
    ),
    "an enum": (
        reduce_, lambda: (batch()[0], Reduction.MEAN), lambda: (batch()[0], Reduction.SUM), "argument how",
    ),
    "a dtype": (
        lambda self, x, to: x.to(to), lambda: (batch()[0], torch.float64), lambda: (batch()[0], torch.float16), "argument to",
    ),
    "conjugated": (
        lambda self, x: (torch.view_as_real(x.resolve_conj()), x * 2, x.is_conj()),
        lambda: (torch.ones(3, dtype=torch.complex64) * 1j,),
        lambda: ((torch.ones(3, dtype=torch.complex64) * 1j).conj(),),
        "conjugated",
    ),
    "negated": (
        lambda self, x: (x * 2, x.is_neg()),
        lambda: ((torch.ones(3, dtype=torch.complex64) * 1j).imag,),
        lambda: ((torch.ones(3, dtype=torch.complex64) * 1j).conj().imag,),
        "negated",
    ),
    "an int instead of a float": (
        lambda self, x, b: x * b + (0 if isinstance(b, int) else 1),
        lambda: (batch()[0], 2.0), lambda: (batch()[0], 2), "argument b",
    ),
    "a default left out": (reduce_, lambda: (batch()[0], "sum"), lambda: (batch()[0],), "positional arguments"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_facts_of_arguments(name):
    body, first, second, reason = ARGUMENTS[name]
    calls = {"now": first}

    def change(_world: World) -> None:
        calls["now"] = second

    def back(_world: World) -> None:
        calls["now"] = first

    def make() -> Case:
        calls["now"] = first
        return Case(
            change,
            reason,
            back=back,
            body=body,
            options={"optimizer": None, "model": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh())},
            args=lambda _world: calls["now"](),
        )

    case = make()
    expected = play(case, make_world(False, case.body, **case.options))
    calls["now"] = first
    world = make_world(True, case.body, **case.options)
    got = play(case, world)
    assert_same(expected[::2], got[::2], "call")
    assert got[1::2] == [1, 2, 2, 2, 2], [build.reason for build in world.step.builds]
    assert reason in world.step.builds[-1].reason


FLOAT_USES: dict[str, Callable[..., Any]] = {
    "times": lambda self, x, b: x * b + b,
    "alpha of add": lambda self, x, b: torch.add(x, x, alpha=b),
    "tensor": lambda self, x, b: x * torch.tensor(b),
    "tensor of its own dtype": lambda self, x, b: x * torch.tensor(b, dtype=torch.float64),
    "as_tensor": lambda self, x, b: x * torch.as_tensor(b),
    "full": lambda self, x, b: x + torch.full((4,), b),
    "full_like": lambda self, x, b: x + torch.full_like(x, b),
    "fill_": lambda self, x, b: x + torch.empty(4).fill_(b),
    "clamp": lambda self, x, b: x.clamp(-b, b),
    "lerp": lambda self, x, b: torch.lerp(x, x * x, b),
    "addcmul": lambda self, x, b: torch.addcmul(x, x, x, value=b),
    "pow": lambda self, x, b: x.abs() ** b,
    "rsub": lambda self, x, b: 1 - x / b,
    "arithmetic": lambda self, x, b: x * (1 - b**2 / 3 + abs(b)),
    "where": lambda self, x, b: torch.where(x > 0, x, b),
    "comparison with a tensor": lambda self, x, b: (x > b) * x,
    "loss weight": lambda self, x, b: functional.huber_loss(x, x * 0.3) * b,
    "isinstance": lambda self, x, b: x * b if isinstance(b, float) else x,
    "square of what may be negative": lambda self, x, b: x * (0.5 - b) ** 2 + (-b) ** 2,
    "in a nested dict": lambda self, x, b: x * {"b": [b]}["b"][0],
}


@pytest.mark.parametrize("name", FLOAT_USES)
def test_a_float_argument_moves_without_a_build(name):
    body = FLOAT_USES[name]
    x = batch()[0]
    step = make_world(True, body, optimizer=None).step
    for b in (0.3, 0.7, 1.0, 0.0, 2.5):
        assert_same(body(None, x, b), step(x, b), f"{b}")
    assert len(step.builds) == 1, [build.reason for build in step.builds]


SPECIALISING_USES: dict[str, Callable[..., Any]] = {
    "float()": lambda self, x, b: x * float(b),
    "int()": lambda self, x, b: x * int(b),
    "round()": lambda self, x, b: x * round(b, 1),
    "math": lambda self, x, b: x * __import__("math").exp(b),
    "f-string": lambda self, x, b: x * float(f"{b}"),
    "list in a tensor": lambda self, x, b: x * torch.tensor([b, 1.0, 1.0, 1.0]),
    "new_tensor": lambda self, x, b: x * x.new_tensor(b),
    "new_tensor of a list": lambda self, x, b: x * x.new_tensor([b]),
    "FloatTensor": lambda self, x, b: x * torch.FloatTensor([b]),
    "numpy": lambda self, x, b: x * torch.from_numpy(__import__("numpy").full(4, b, dtype="float32")),
    "softplus beta": lambda self, x, b: functional.softplus(x, beta=b),
    "label smoothing": lambda self, x, b: functional.cross_entropy(
        x, torch.zeros(5, dtype=torch.int64), label_smoothing=b
    ),
    "layer norm eps": lambda self, x, b: functional.layer_norm(x, (4,), eps=b),
    "arange": lambda self, x, b: x + torch.arange(0, 4 * b, b)[:4],
    "linspace": lambda self, x, b: x + torch.linspace(0, b, 4),
    "normal": lambda self, x, b: torch.normal(0.0, b, (3,)),
    "dropout": lambda self, x, b: functional.dropout(x, b),
    "a key of a dict": lambda self, x, b: x * {0.5: 2.0, 0.25: 3.0}[b],
    "floor division": lambda self, x, b: x * (b // 0.1) + (1.0 // b),
    "divmod": lambda self, x, b: x * divmod(b * 2, 0.1)[0] + divmod(b, 0.7)[1],
    "max()": lambda self, x, b: x * max(b, 0.3),
    "an equality": lambda self, x, b: x * (2 if b == 0.5 else 3),
}


@pytest.mark.parametrize("name", SPECIALISING_USES)
def test_a_float_argument_used_in_python_is_never_stale(name):
    body = SPECIALISING_USES[name]
    x = batch()[0]
    step = make_world(True, body, optimizer=None).step
    for b in (0.5, 0.25, 0.5, 0.5, 0.25):
        torch.manual_seed(5)
        expected = body(None, x, b)
        torch.manual_seed(5)
        assert_same(expected, step(x, b), f"{b}")
    assert len(step.builds) <= 2, [build.reason for build in step.builds]


def test_a_branch_on_a_float_argument_is_recorded():
    def body(self: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        loss = self.loss(self.model(x), torch.zeros(5, dtype=torch.int64))
        if beta > 0:
            loss = loss + beta * self.model.fc.weight.square().sum()
        loss.backward()
        return loss

    sides = [make_world(graph, body) for graph in (False, True)]
    for index, (beta, builds) in enumerate([(0.5, 1), (0.25, 1), (0.0, 2), (-1.0, 2), (0.1, 2), (0.0, 2)]):
        results = []
        for world in sides:
            torch.manual_seed(index)
            results.append({"loss": detached(world.step(batch()[0], beta)), **world.state()})
        assert_same(*results, f"call {index}")
        assert len(sides[1].step.builds) == builds, [b.reason for b in sides[1].step.builds]
    assert "branch" in sides[1].step.builds[-1].reason


def test_a_float_of_numpy_is_a_float():
    step = make_world(True, FLOAT_USES["times"], optimizer=None).step
    x = batch()[0]
    for b in (np.float64(0.5), 0.25, np.float64(2.0)):
        assert_same(x * float(b) + float(b), step(x, b))
    assert len(step.builds) == 1


def test_nan_as_the_first_float():
    def body(self: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        return x * beta

    step = make_world(True, body, optimizer=None).step
    x = batch()[0]
    for beta in (float("nan"), 1.0, float("-inf")):
        assert_same(x * beta, step(x, beta))


@pytest.mark.parametrize("first", [2.0, float("inf"), float("-inf"), float("nan")])
def test_floats_that_are_not_finite_are_constants_of_a_build(first):
    # to torch a symbol is finite, so that it answers without a guard whether one is infinite
    def body(self: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        return x * 2 if beta == float("inf") else x * 3 if beta == float("-inf") else x * beta

    step = make_world(True, body, optimizer=None).step
    x = batch()[0]
    for beta in (first, float("inf"), 2.0, float("nan"), float("-inf"), 3.0, float("nan"), first):
        assert_same(body(None, x, beta), step(x, beta))
    assert len(step.builds) == 4


def test_an_infinite_order_of_a_norm_has_a_gradient():
    def body(self: Any, x: torch.Tensor, order: float) -> torch.Tensor:
        x.requires_grad_()
        return torch.autograd.grad(torch.linalg.vector_norm(x, order), x)[0]

    step = make_world(True, body, optimizer=None).step
    x = torch.randn(5)
    for order in (float("inf"), 2.5):
        assert_same(body(None, x.clone(), order), step(x.clone(), order))


def test_slices_and_the_ellipsis_are_arguments():
    def body(self: Any, x: torch.Tensor, index: Any) -> torch.Tensor:
        return x[index] * 2

    step = make_world(True, body, optimizer=None).step
    x = torch.randn(4, 5)
    for index in ((..., slice(1, 3)), slice(None, None, 2), (..., slice(1, 4)), (..., slice(1, 3)), None):
        assert_same(body(None, x, index), step(x, index))
    assert len(step.builds) == 4


def test_the_factor_of_interpolate_makes_a_size():
    def body(self: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=factor, mode="bilinear", recompute_scale_factor=True)

    step = make_world(True, body, optimizer=None).step
    x = torch.randn(1, 2, 5, 5)
    for factor in (1.7, 0.6, [1.7, 2.0]):
        assert_same(body(None, x, factor), step(x, factor))


# --- arguments that are state, and hooks of arguments ------------------------------------------------------------------------


def norm_of(self: Any, w: torch.Tensor) -> torch.Tensor:
    loss = (self.model(torch.ones(1, 4)) * 2).sum() + (w * w).sum()
    loss.backward()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("parameter_first", [True, False])
def test_an_argument_that_is_a_parameter_is_not_any_tensor(parameter_first):
    trails = []
    for graph in (False, True):
        world = make_world(graph, norm_of, model=lambda: nn.Linear(4, 3), optimizer=sgd)
        trail = []
        for index in range(4):
            other = nn.Parameter(torch.ones(3, 4))
            w = world.model.weight if (index % 2 == 0) is parameter_first else other
            trail.append((detached(world.step(w)), world.state(), other.grad))
        trails.append(trail)
    assert_same(*trails)
    assert len(world.step.builds) == 2
    assert "argument w" in world.step.builds[-1].reason
    assert "model.weight" in world.step.builds[-1].reason


def test_the_same_tensor_twice_is_not_two_tensors():
    def body(self: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a * 1, b * 1

    step = make_world(True, body, optimizer=None).step
    a, b = torch.zeros(3), torch.zeros(3)
    assert_same((torch.ones(3), torch.zeros(3)), step(a, b))
    assert_same((torch.ones(3), torch.ones(3)), step(b, b))
    assert_same((torch.full((3,), 2.0), torch.ones(3)), step(a, b))
    assert len(step.builds) == 2


def test_hooks_of_arguments_are_facts():
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss

    trails = []
    for graph in (False, True):
        world = make_world(graph, body, model=lambda: nn.Linear(4, 3), optimizer=sgd)
        trail = []
        for factor in (None, 2.0, 3.0, None, 2.0):
            x = batch()[0].requires_grad_()
            if factor is not None:
                x.register_hook(lambda gradient, factor=factor: gradient * factor)
            trail.append((detached(world.step(x)), x.grad))
        trails.append(trail)
    assert_same(*trails)


# --- optimizers -------------------------------------------------------------------------------------------------------------


def group_value(key: str, value: Any) -> Callable[[World], None]:
    def change(world: World) -> None:
        group = world.optimizer.param_groups[0]
        world.kept.setdefault(key, group[key])
        group[key] = value

    return change


def group_back(key: str) -> Callable[[World], None]:
    return lambda world: world.optimizer.param_groups[0].__setitem__(key, world.kept[key])


def sgd_with(**options: Any) -> dict[str, Any]:
    return {"optimizer": lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})}


def adam_with(**options: Any) -> dict[str, Any]:
    return {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), **options)}


def new_group(world: World) -> None:
    world.model.register_parameter("offset", nn.Parameter(torch.zeros(3)))
    world.optimizer.add_param_group({"params": [world.model.offset], "lr": 0.5})


def half_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [model.fc.weight, model.fc.bias]}], lr=0.1)


def reload_optimizer(world: World) -> None:
    world.optimizer.load_state_dict(
        {
            **(saved := world.optimizer.state_dict()),
            "state": {
                key: {name: v * 2 if name.startswith("exp") else v for name, v in entries.items()}
                for key, entries in saved["state"].items()
            },
        }
    )


def start_amsgrad(world: World) -> None:
    """torch makes this state in the first step only, so that a user who switches it on adds it by hand."""
    world.optimizer.param_groups[0]["amsgrad"] = True
    for entries in world.optimizer.state.values():
        entries["max_exp_avg_sq"] = torch.zeros_like(entries["exp_avg_sq"])


def clear_state(world: World) -> None:
    world.optimizer.state.clear()


def second_optimizer(world: World) -> None:
    rest = [p for name, p in world.model.named_parameters() if not name.startswith("fc")]
    optimizer = torch.optim.Adam(rest, lr=0.3)
    world.step.add_optimizer(optimizer)
    world.kept["optimizers"] = [optimizer]


class Custom(torch.optim.Optimizer):
    """An optimizer that keeps a number outside of its groups."""

    factor = 2.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.beta = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.beta * self.factor)


CUSTOM = {"optimizer": lambda model: Custom(model.parameters())}


OPTIMIZERS = {
    "lr": Case(group_value("lr", 0.7), builds=1, back=group_back("lr"), options=adam_with()),
    "lr as an int": Case(group_value("lr", 1), builds=1, back=group_back("lr"), options=adam_with()),
    "lr as a tensor": Case(
        group_value("lr", torch.tensor(0.7)), "lr", back=group_back("lr"), options=adam_with(foreach=False)
    ),
    "betas": Case(group_value("betas", (0.5, 0.6)), builds=1, back=group_back("betas"), options=adam_with()),
    "betas from an int": Case(
        group_value("betas", (0.5, 0.999)),
        "betas",
        back=group_back("betas"),
        options={"optimizer": lambda model: torch.optim.NAdam(model.parameters(), betas=(0, 0.999))},
    ),
    "eps": Case(group_value("eps", 0.1), builds=1, back=group_back("eps"), options=adam_with()),
    "weight decay": Case(
        group_value("weight_decay", 0.3), builds=1, back=group_back("weight_decay"), options=adam_with()
    ),
    "weight decay from 0.0": Case(
        group_value("weight_decay", 0.3), "weight_decay", back=group_back("weight_decay"),
        options=sgd_with(weight_decay=0.0),
    ),
    "weight decay from the int 0": Case(
        group_value("weight_decay", 0.3), "weight_decay", back=group_back("weight_decay"), options=sgd_with()
    ),
    "weight decay to 0.0": Case(
        group_value("weight_decay", 0.0), "weight_decay", back=group_back("weight_decay"),
        options=sgd_with(weight_decay=0.3),
    ),
    "momentum": Case(group_value("momentum", 0.5), builds=1, back=group_back("momentum"), options=sgd_with(momentum=0.9)),
    "momentum from 0": Case(
        group_value("momentum", 0.5), "momentum", options=sgd_with()
    ),
    "dampening": Case(group_value("dampening", 0.5), "dampening", options=sgd_with(momentum=0.9)),
    "nesterov": Case(
        group_value("nesterov", True), "nesterov", back=group_back("nesterov"), options=sgd_with(momentum=0.9)
    ),
    "maximize": Case(group_value("maximize", True), "maximize", back=group_back("maximize"), options=adam_with()),
    "foreach": Case(group_value("foreach", True), "foreach", back=group_back("foreach"), options=adam_with(foreach=False)),
    "fused": Case(group_value("fused", True), "fused", back=group_back("fused"), options=sgd_with(foreach=False)),
    "amsgrad": Case(start_amsgrad, "amsgrad", options=adam_with(foreach=False)),
    "a new group": Case(new_group, "offset"),
    "load_state_dict": Case(reload_optimizer, builds=1, options=adam_with()),
    "state cleared": Case(clear_state, "optimizer", options=adam_with()),
    "a second optimizer": Case(
        second_optimizer, "optimizer", options={"optimizer": half_groups}
    ),
    "a parameter taken out": Case(
        lambda w: w.optimizer.param_groups[0]["params"].pop(), "params"
    ),
    "an attribute of a custom optimizer": Case(
        lambda w: setattr(w.optimizer, "beta", 2.0), "beta", back=lambda w: setattr(w.optimizer, "beta", 0.5),
        options=CUSTOM,
    ),
    "a new entry of a group": Case(lambda w: w.optimizer.param_groups[0].update(note=1), "note", options=CUSTOM),
    "state changed in place": Case(
        lambda w: [e["exp_avg"].mul_(3) for e in w.optimizer.state.values()], builds=1, options=adam_with()
    ),
    "a state tensor replaced": Case(
        lambda w: w.optimizer.state[w.model.fc.weight].update(exp_avg=torch.ones(6, 4)), builds=1, options=adam_with()
    ),
    "storage of a state tensor": Case(
        lambda w: setattr(w.optimizer.state[w.model.fc.weight]["exp_avg"], "data", torch.ones(6, 4)), builds=1,
        options=adam_with(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_facts_of_optimizers(name):
    check(OPTIMIZERS[name])


def test_the_class_of_a_custom_optimizer():
    def reset(_world: World) -> None:
        Custom.factor = 2.0

    try:
        check(Case(lambda w: setattr(Custom, "factor", 5.0), "factor", back=reset, options=CUSTOM))
    finally:
        Custom.factor = 2.0


# --- hooks --------------------------------------------------------------------------------------------------------------------


def doubled(factor: float) -> Callable[..., Any]:
    return lambda gradient: gradient * factor


def register(how: Callable[[World], Any]) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.kept["handle"] = how(world)

    return change


def remove(world: World) -> None:
    world.kept["handle"].remove()


def scale_output(factor: float) -> Callable[..., Any]:
    return lambda module, args, output: output * factor


def scale_after(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(2)


def global_forward(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Dropout) else None


HOOKS = {
    "hook of a parameter": lambda w: w.model.fc.weight.register_hook(doubled(3.0)),
    "post-accumulate hook": lambda w: w.model.fc.weight.register_post_accumulate_grad_hook(scale_after),
    "forward hook": lambda w: w.model.fc.register_forward_hook(scale_output(3.0)),
    "forward pre-hook": lambda w: w.model.fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "full backward hook": lambda w: w.model.fc.register_full_backward_hook(
        lambda module, grad_in, grad_out: tuple(g if g is None else g * 2 for g in grad_in)
    ),
    "full backward pre-hook": lambda w: w.model.head.register_full_backward_pre_hook(
        lambda module, grad_out: tuple(g * 2 for g in grad_out)
    ),
    "global forward hook": lambda w: module_hooks.register_module_forward_hook(global_forward),
    "global forward pre-hook": lambda w: module_hooks.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Dropout) else None
    ),
    "global backward hook": lambda w: module_hooks.register_module_full_backward_hook(
        lambda module, grad_in, grad_out: tuple(g * 2 for g in grad_in) if isinstance(module, nn.Dropout) else None
    ),
    "optimizer pre-hook": lambda w: w.optimizer.register_step_pre_hook(halve_gradients),
    "optimizer post-hook": lambda w: w.optimizer.register_step_post_hook(shrink_parameters),
    "global optimizer pre-hook": lambda w: optimizer_hooks.register_optimizer_step_pre_hook(halve_gradients),
}  # fmt: skip


def halve_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def shrink_parameters(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_registered_and_removed(name):
    case = Case(register(HOOKS[name]), "hook", back=remove)
    worlds: list[World] = []

    def remember(world: World) -> None:
        worlds.append(world)
        register(HOOKS[name])(world)

    case.change = remember
    try:
        check(case)
    finally:
        for world in worlds:
            remove(world)


def gradient_hook(factor: float) -> Callable[..., Any]:
    return lambda gradient: gradient * factor


def accumulated_hook(factor: float) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(factor)

    return hook


def output_hook(factor: float) -> Callable[..., Any]:
    return lambda module, args, out: out * factor


def made_at(address: int | None, make: Callable[[], Any]) -> Any:
    """An object at the address of one that is gone, if nobody keeps that one."""
    tries = [make() for _ in range(200)]
    return next((item for item in tries if id(item) == address), tries[0])


@pytest.mark.parametrize(
    ("hook", "register_on"),
    [
        (gradient_hook, lambda model, hook: model.weight.register_hook(hook)),
        (accumulated_hook, lambda model, hook: model.weight.register_post_accumulate_grad_hook(hook)),
        (output_hook, lambda model, hook: model.register_forward_hook(hook)),
    ],
    ids=["parameter", "post-accumulate", "module"],
)
def test_a_hook_exchanged_for_another_at_its_address(hook, register_on):
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss

    trails = []
    for graph in (False, True):
        world = make_world(graph, body, model=lambda: nn.Linear(4, 3), optimizer=sgd)
        trail, address = [], None
        for factor in (0.5, 0.25, 0.125):
            gc.collect()
            current = made_at(address, lambda factor=factor: hook(factor))
            handle = register_on(world.model, current)
            trail.append((detached(world.step(batch()[0])), world.state()))
            handle.remove()
            address = id(current)
            del current
        trails.append(trail)
    assert_same(*trails)


def test_two_modules_in_closures_are_two():
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        return first(x) + second(x)

    step = make_world(True, body, optimizer=None).step
    x = batch()[0]
    for module in (first, second, first):
        torch.manual_seed(1)
        expected = body(None, x)
        torch.manual_seed(1)
        assert_same(expected, step(x))
        module.train(not module.training)
    torch.manual_seed(1)
    expected = body(None, x)
    torch.manual_seed(1)
    assert_same(expected, step(x))


# --- builds do not pile up, and do not hold what is gone --------------------------------------------------------------------


def test_two_states_in_turn_need_one_build():
    world = make_world(True, infer, optimizer=None)
    world.model.eval()
    x, y = batch()
    for _ in range(4):
        world.step(x, y)
        swap_data(world)
    assert len(world.step.builds) == 1


def test_a_model_that_was_replaced_can_be_freed():
    world = make_world(True, infer, optimizer=None)
    world.step(*batch())
    gone = weakref.ref(world.model.head.weight)
    world.model.head = nn.Linear(6, 3)
    world.step(*batch())
    world.step(*batch())
    gc.collect()
    assert gone() is None


def test_many_builds_are_said_aloud(caplog):
    class Shift(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.shift = "0"

        def build(self, x):
            return x + int(self.shift)

    graph = Shift()
    with caplog.at_level("WARNING", logger="monograph"):
        for graph.shift in "01234567":
            graph(torch.ones(2))
        assert not caplog.records
        graph.shift = "8"
        graph(torch.ones(2))
    assert "build 8: graph.shift changed from '7' to '8'" in caplog.text


def test_where_an_argument_begins_is_a_fact_for_absolute_positions():
    """as_strided counts from the beginning of the memory, not of the tensor."""
    memory = torch.arange(20.0)
    graph = mg.trace(lambda x: x.as_strided((2,), (1,), 1) * 2)
    slope = mg.trace(lambda x: torch.autograd.grad(x.as_strided((1,), (1,), 4).sum(), x)[0])
    for begin in (0, 4, 0):
        x = memory[begin : begin + 9]
        assert graph(x).tolist() == [2.0, 4.0]
        leaf = x.detach().requires_grad_()
        assert slope(leaf).nonzero().tolist() == [[4 - begin]]
    assert [len(graph.builds), len(slope.builds)] == [2, 2]
    assert "argument x begins at element 4 of its memory, not at 0" in graph.builds[1].reason
    relative = mg.trace(lambda x: x.as_strided((2,), (1,)) * 2)
    assert [relative(memory[begin : begin + 9]).tolist() for begin in (0, 4)] == [[0.0, 2.0], [8.0, 10.0]]
    assert len(relative.builds) == 1


def test_what_imports_run_is_no_fact_of_a_step():
    """The first capture of a process imports parts of torch, whose modules make classes by typing_extensions."""
    code = """
import torch
import monograph as mg
model = torch.nn.Linear(2, 2)
step = mg.train_graph(model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters()))
step(torch.ones(3, 2), torch.ones(3, 2))
print(step.explain())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "model.training = True" in done.stdout
    assert "typing_extensions" not in done.stdout
