"""Stale replay: facts of modules, classes and containers are changed after the first call, and eager is the judge."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import monograph as mg
from tests.capture.guards.world import (
    Case,
    Fresh,
    Loss,
    World,
    batch,
    check,
    infer,
    put_back,
    set_to,
    swap_data,
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


# --- facts of modules ---------------------------------------------------------------------------------------


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


@pytest.mark.one_case
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


# --- facts that hang on classes, methods, absent attributes and containers ----------------------------------


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


@pytest.mark.one_case
@pytest.mark.parametrize("name", HIDDEN_FACTS)
def test_facts_that_hide(name):
    check(HIDDEN_FACTS[name])


class Counted(nn.Module):
    """A layer, and a number beside it that an evaluation has counted, as metrics do."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.layer, self.is_used, self.count = nn.Linear(4, 4), is_used, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y + self.count if self.is_used else y


def test_what_inference_mode_has_made_may_lie_beside_a_step() -> None:
    for is_used in (False, True):
        model = Counted(is_used=is_used)
        step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = torch.ones(2, 4), torch.zeros(2, 4)
        step(x, y)
        with torch.inference_mode():
            model.count = torch.ones(())
        if is_used:
            with pytest.raises(mg.UnsupportedTensorError, match="inference_mode"):
                step(x, y)
        else:
            assert step(x, y) < 100
            assert step.verify(x, y)
