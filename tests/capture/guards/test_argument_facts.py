"""Stale replay: facts of arguments are changed after the first call, and eager is the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.capture.guards.world import Case, World, batch, infer, make_world, play
from tests.support import assert_same
from tests.support.steps import detached, sgd

# --- arguments ----------------------------------------------------------------------------------------------


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


@pytest.mark.every_case
@pytest.mark.parametrize("name", FLOAT_USES)
def test_a_float_argument_moves_without_a_build(name):
    if name == "pow" and "statically_known_true" not in inspect.unwrap(torch._refs.pow).__code__.co_names:
        pytest.skip(
            "the kernel of this torch for tensors without data branches on the exponents 0.5, 1, and 2"
        )
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


# --- arguments that are state, and hooks of arguments -------------------------------------------------------


def norm_of(self: Any, w: torch.Tensor) -> torch.Tensor:
    loss = (self.model(torch.ones(1, 4)) * 2).sum() + (w * w).sum()
    loss.backward()
    return loss


@pytest.mark.one_case
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
