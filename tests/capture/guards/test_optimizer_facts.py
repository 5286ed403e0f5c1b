"""Stale replay: facts of optimizers, and hooks that come and go, with eager as the judge."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from tests.capture.guards.world import Case, World, batch, check, make_world
from tests.support import assert_same
from tests.support.steps import detached, sgd

optimizer_hooks = importlib.import_module("torch.optim.optimizer")  # torch deletes the name from torch.optim


# --- optimizers ---------------------------------------------------------------------------------------------


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
    "state cleared": Case(clear_state, builds=1, options=adam_with()),
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


@pytest.mark.one_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_facts_of_optimizers(name):
    check(OPTIMIZERS[name])


@pytest.mark.long
def test_the_class_of_a_custom_optimizer():
    def reset(_world: World) -> None:
        Custom.factor = 2.0

    try:
        check(Case(lambda w: setattr(Custom, "factor", 5.0), "factor", back=reset, options=CUSTOM))
    finally:
        Custom.factor = 2.0


# --- hooks --------------------------------------------------------------------------------------------------


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


@pytest.mark.one_case
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


@pytest.mark.one_case
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
