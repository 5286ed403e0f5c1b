"""Whatever build() reads of containers, modules and functions of autograd is changed after the first call; eager mode is the judge."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import monograph as mg
from tests.capture.guards.sources.stale import Case, Cases, Config, X, check_change, same_step

CASES = Cases()
case = CASES.add


# --- containers: order and type -----------------------------------------------------------------------------


class Bumps(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, value in parts.items():
            setattr(self, name, value)


class Add(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.amount


class Mul(Add):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.amount


@case
def modules_of_a_dict_in_another_order() -> Case:
    layers = nn.ModuleDict({"a": Add(1.0), "b": Mul(3.0)})

    def build(self: Any, x: torch.Tensor) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x

    return {"layers": layers}, build, lambda: layers.update({"a": layers.pop("a")})


@case
def modules_of_a_sequential_in_another_order() -> Case:
    layers = nn.Sequential(Add(1.0), Mul(3.0))

    def change() -> None:
        layers._modules = dict(reversed(layers._modules.items()))

    return {"layers": layers}, lambda self, x: self.layers(x), change


@case
def parameters_registered_in_another_order() -> Case:
    module = Bumps(a=nn.Parameter(torch.tensor(2.0)), b=nn.Parameter(torch.tensor(5.0)))

    def build(self: Any, x: torch.Tensor) -> Any:
        for p in self.module.parameters():
            x = (x + p) * p
        return x.detach()

    def change() -> None:
        first = module.a
        del module.a
        module.a = first

    return {"module": module}, build, change


@case
def a_dict_of_transforms_in_another_order() -> Case:
    transforms = {"a": lambda x: x + 1, "b": lambda x: x * 3}

    def build(self: Any, x: torch.Tensor) -> Any:
        for transform in self.transforms.values():
            x = transform(x)
        return x

    return {"transforms": transforms}, build, lambda: transforms.update(a=transforms.pop("a"))


@case
def other_keyword_only_defaults_of_a_function() -> Case:
    def scaled(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        return x * by

    return (
        {"scaled": scaled},
        lambda self, x: self.scaled(x),
        lambda: setattr(scaled, "__kwdefaults__", {"by": 5.0}),
    )


def namespace_case(use: Callable[[Any], float]) -> Callable[[], Case]:
    def make() -> Case:
        space = SimpleNamespace(a=1.0)
        return (
            {"held": {"space": space}},
            lambda self, x: x + use(self.held["space"]),
            lambda: setattr(space, "a", 1000.0),
        )

    return make


OTHER = SimpleNamespace(a=1000.0)
CASES |= {
    "a text of a namespace": namespace_case(lambda space: float(len(repr(space)))),
    "a namespace in a text": namespace_case(lambda space: float(len(f"<{space}>"))),
    "a namespace in the text of a dict": namespace_case(lambda space: float(len(str({1: space})))),
    "namespaces compared": namespace_case(lambda space: float(space == OTHER)),
    "a namespace in a list": namespace_case(lambda space: float(space in [OTHER, 1])),
}
LIBRARY = torch.library.Library("monograph_tests", "FRAGMENT")


@case
def a_variable_of_a_function_that_only_the_dispatcher_holds() -> Case:
    by = 2.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * by

    def change() -> None:
        nonlocal by
        by = 5.0

    LIBRARY.define("scaled(Tensor x) -> Tensor")
    LIBRARY.impl("scaled", scaled, "CompositeImplicitAutograd")
    return {}, lambda self, x: torch.ops.monograph_tests.scaled(x), change


def value_case(before: Any, after: Any, use: Callable[[Any], Any]) -> Callable[[], Case]:
    def make() -> Case:
        holder = SimpleNamespace(value=before)

        def build(self: Any, x: torch.Tensor) -> Any:
            return x + use(self.holder.value)

        return {"holder": holder}, build, lambda: setattr(holder, "value", after)

    return make


def kind_of(value: Any) -> float:
    kinds = [bool, int, float, str, tuple, list, type(None)]
    return float(kinds.index(type(value)))


CASES |= {
    "a tuple of a float for an int": value_case((2,), (2.0,), lambda v: kind_of(v[0])),
    "a tuple of a bool for an int": value_case((1,), (True,), lambda v: kind_of(v[0])),
    "a set of a float for an int": value_case({1}, {1.0}, lambda v: kind_of(next(iter(v)))),
    "a frozen set of a float": value_case(frozenset({1}), frozenset({1.0}), lambda v: kind_of(next(iter(v)))),
    "minus zero": value_case(0.0, -0.0, lambda v: 1.0 if str(v) == "0.0" else 2.0),
    "a range with the same numbers": value_case(range(0, 5, 2), range(0, 6, 2), lambda v: float(v.stop)),
    "the sign of a NaN": value_case(math.nan, -math.nan, lambda v: math.copysign(1.0, v)),
    "a bool for an int": value_case(1, True, kind_of),
    "a float for an int": value_case(1, 1.0, kind_of),
    "a nested minus zero": value_case(((0.0,),), ((-0.0,),), lambda v: 1.0 if str(v[0][0]) == "0.0" else 2.0),
    "a complex minus zero": value_case(
        0j, complex(0.0, -0.0), lambda v: 1.0 if str(v.imag) == "0.0" else 2.0
    ),
    "a list for a tuple": value_case((1,), [1], kind_of),
    "the order of a dict": value_case(
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda v: float(next(iter(v.values())))
    ),
    "a longer text": value_case("a", "ab", lambda v: float(len(v))),
    "nan for a number": value_case(1.0, float("nan"), lambda v: 1.0 if v == v else 2.0),
}


# --- modules and functions of autograd ----------------------------------------------------------------------


@case
def the_class_of_a_module() -> Case:
    module = Add(2.0)
    return {"module": module}, lambda self, x: self.module(x), lambda: setattr(module, "__class__", Mul)


class Scaled(torch.autograd.Function):
    gain = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Scaled.gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * Scaled.gain


@case
def an_attribute_of_a_function_of_autograd() -> Case:
    Scaled.gain = 2.0
    return {}, lambda self, x: Scaled.apply(x), lambda: setattr(Scaled, "gain", 5.0)


@case
def an_attribute_read_in_backward() -> Case:
    module = Bumps(w=nn.Parameter(torch.tensor(2.0)))
    Backwards.gain = 2.0

    def build(self: Any, x: torch.Tensor) -> Any:
        return torch.autograd.grad(Backwards.apply((x + 1) * self.module.w).sum(), self.module.w)[0]

    return {"module": module}, build, lambda: setattr(Backwards, "gain", 5.0)


class Backwards(torch.autograd.Function):
    gain = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * Backwards.gain


@case
def a_config_on_the_class_of_a_module() -> Case:
    class Layer(nn.Module):
        config = Config()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.config.k

    return {"layer": Layer()}, lambda self, x: self.layer(x), lambda: setattr(Layer.config, "k", 5.0)


@case
def a_variable_of_the_environment_that_appears() -> Case:
    os.environ.pop("MONOGRAPH_TESTS_GAIN", None)
    return (
        {"restore": lambda: os.environ.pop("MONOGRAPH_TESTS_GAIN", None)},
        lambda self, x: x * float(os.getenv("MONOGRAPH_TESTS_GAIN", "2")),
        lambda: os.environ.update(MONOGRAPH_TESTS_GAIN="5"),
    )


@case
def an_attribute_of_a_parameter() -> Case:
    layer = nn.Linear(3, 3)
    layer.weight.gain = 2.0
    return (
        {"layer": layer},
        lambda self, x: self.layer(x) * self.layer.weight.gain,
        lambda: setattr(layer.weight, "gain", 5.0),
    )


@case
def an_attribute_that_a_parameter_gets() -> Case:
    layer = nn.Linear(3, 3)
    return (
        {"layer": layer},
        lambda self, x: self.layer(x) * getattr(self.layer.weight, "gain", 1.0),
        lambda: setattr(layer.weight, "gain", 5.0),
    )


def _wrapped(owner: Any, name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """What puts a function in the place of another of torch, which it calls, and what takes it away."""
    theirs, is_own = getattr(owner, name), name in vars(owner)

    def wrap() -> None:
        setattr(owner, name, lambda x, *args, **kwargs: theirs(x, *args, **kwargs) * 3)

    return wrap, lambda: setattr(owner, name, theirs) if is_own else delattr(owner, name)


@case
def a_function_of_torch_that_is_wrapped() -> Case:
    wrap, restore = _wrapped(functional, "silu")
    return {"restore": restore, "act": nn.SiLU()}, lambda self, x: self.act(x) + functional.silu(x), wrap


@case
def a_builtin_function_of_torch_that_is_wrapped() -> Case:
    wrap, restore = _wrapped(torch, "tanh")
    return {"restore": restore}, lambda self, x: torch.tanh(x), wrap


@case
def a_method_of_tensors_that_is_wrapped() -> Case:
    wrap, restore = _wrapped(torch.Tensor, "square")
    return {"restore": restore}, lambda self, x: x.square(), wrap


@case
def a_method_of_tensors_in_python_that_is_wrapped() -> Case:
    wrap, restore = _wrapped(torch.Tensor, "norm")
    return {"restore": restore}, lambda self, x: x.norm(), wrap


@case
def a_keyword_of_a_partial_that_was_never_called() -> Case:
    # the first call of a partial changes the address at which C code keeps the way to call it
    keywords = {"gain": 2.0}
    table = {"scale": functools.partial(lambda x, gain: x * gain, **keywords)}
    return (
        {"table": table},
        lambda self, x: self.table["scale"](x),
        lambda: table["scale"].keywords.update(gain=5.0),
    )


@case
def a_hook_that_reads_a_closure() -> Case:
    layer, gains = nn.Identity(), [2.0]
    layer.register_forward_hook(lambda module, args, out: out * gains[0])
    return {"layer": layer}, lambda self, x: self.layer(x), lambda: gains.__setitem__(0, 5.0)


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    check_change(CASES[name]())


def test_functions_behind_decorators_of_libraries_are_found_without_a_search_of_all_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Objects that `gc.freeze()` has put aside are in no search, and a search takes long where there are many."""
    factor = 2.0

    @torch.no_grad()
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return scaled(x) + factor

    plain, graph = same_step({}, build)
    monkeypatch.setattr("gc.get_referrers", lambda *objects: [])
    for factor in (2.0, 3.0, 2.0):  # noqa: B007
        assert torch.equal(graph(X), plain.build(X))
    assert len(graph.builds) == 2


@pytest.mark.parametrize("name", ["monograph_models", "sympy_models"])
def test_modules_whose_names_begin_as_those_that_are_not_searched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("SCALE = 2.0\n\n\ndef scaled(x):\n    return x * SCALE\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    graph = mg.trace(module.scaled)
    for module.SCALE in (2.0, 3.0):
        assert torch.equal(graph(X), X * module.SCALE)
