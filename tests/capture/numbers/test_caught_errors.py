"""Errors that arithmetic on numbers raises: build() may catch them, in the step that is captured and in each later one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support.float_expressions import bits, outcome

X = torch.tensor([0.25, -1.5, 3.0])
BACKENDS = ("aten", "inductor")

Number = Callable[[float], Any]
NUMBERS: dict[str, tuple[Number, tuple[float, ...]]] = {
    "division": (lambda w: 1 / w, (0.0, 2.0, -0.0, 4.0)),
    "division of a difference": (lambda w: 1 / (w - 1), (1.0, 2.0, 4.0, 1.0)),
    "division by a quotient": (lambda w: 1 / (1 / w), (0.0, 2.0, 1e308, 5e-324, 0.0)),
    "division that nobody takes": (lambda w: (1 / w, 2.0)[1], (0.0, 2.0, 4.0)),
    "modulo": (lambda w: 1 % w, (0.0, 0.3, 0.4)),
    "floor division": (lambda w: 1 // w, (0.0, 0.3, 0.4)),
    "exp": (math.exp, (1000.0, 1.0, 2000.0, 2.0)),
    "logarithm": (math.log, (-1.0, 1.0, 0.0, 2.0)),
    "square root": (math.sqrt, (-1.0, 4.0, -4.0, 9.0)),
    "power": (lambda w: w**w, (1000.0, 2.0, 3.0)),
    "power of zero": (lambda w: w**-1, (0.0, 2.0, 3.0)),
    "math.pow": (lambda w: math.pow(w, w), (1000.0, 2.0, -1.5, 3.0)),
    "a whole number": (lambda w: int(w / 1e-300), (1e300, 0.0, 1e300)),
}


def with_a_word(function: Number, x: torch.Tensor, w: float) -> Any:
    try:
        return x * function(w)
    except ArithmeticError:
        return x - 1
    except ValueError:
        return x - 2


def suppressed(function: Number, x: torch.Tensor, w: float) -> Any:
    with contextlib.suppress(ArithmeticError, ValueError):
        x = x + 1
        x = x * function(w)
    return x


def uncaught(function: Number, x: torch.Tensor, w: float) -> Any:
    return x * function(w)


def compared(step: Callable[..., Any], calls: Sequence[float], backend: str) -> mg.Graph:
    """A graph that was called with each number, and gave what the plain function gives, or its error."""

    class Called(mg.Graph):
        def build(self, x: torch.Tensor, w: float) -> Any:
            return step(x, w)

    graph = Called()
    graph.config.backend(backend)
    for w in calls:
        expected, got = outcome(lambda w=w: step(X, w)), outcome(lambda w=w: graph(X, w))  # type: ignore[misc]
        if isinstance(expected, Exception):
            assert (type(got), str(got)) == (type(expected), str(expected)), w
        else:
            assert bits(expected) == bits(got), (w, expected, got)
    return graph


@pytest.mark.parametrize("caught", [with_a_word, suppressed, uncaught], ids=lambda item: item.__name__)
@pytest.mark.parametrize("name", NUMBERS)
def test_an_argument_raises_what_it_raises_in_eager_mode(name: str, caught: Any) -> None:
    function, values = NUMBERS[name]
    for calls in (values, values[::-1], values[1:] + values):
        compared(lambda x, w: caught(function, x, w), calls, "aten")


@pytest.mark.long
@pytest.mark.parametrize("name", ["division by a quotient", "modulo", "exp", "square root", "power"])
def test_compiled_code_raises_nothing_and_is_not_asked(name: str) -> None:
    function, values = NUMBERS[name]
    compared(lambda x, w: with_a_word(function, x, w), values[::-1], "inductor")
    compared(lambda x, w: uncaught(function, x, w), values[1:] + values, "inductor")


def test_values_that_raise_have_one_build_and_all_others_another_one() -> None:
    calls = (0.5, 0.0, 0.7, -0.0, 0.1, 0.0)
    assert len(compared(lambda x, w: with_a_word(lambda w: 1 / w, x, w), calls, "aten").builds) == 2


def test_the_line_of_an_error_is_that_of_the_user() -> None:
    graph = mg.trace(lambda x, w: x * (1 / w))
    graph(X, 1.0)
    with pytest.raises(ZeroDivisionError) as caught:
        graph(X, 0.0)
    assert str(caught.traceback[-1].path) == __file__
    assert len(graph.builds) == 1


ROOM: dict[str, tuple[Callable[[torch.Tensor, float], Any], tuple[float, ...]]] = {
    "fill_": (lambda x, w: x.clone().fill_(w), (1e300, 2.0, 1e300, -1e300)),
    "full": (lambda _x, w: torch.full((2,), w), (1e300, 2.0, 1e300)),
    "alpha": (lambda x, w: x.add(x, alpha=w), (1e300, 2.0, 3.0)),
    "product": (lambda x, w: x * w, (1e300, 2.0, 3.0)),  # an infinity, and no error
    "half": (lambda x, w: x.half().masked_fill(x > 0, w), (-1e9, 2.0, 3.0)),
    "small whole numbers": (lambda _x, w: torch.full((2,), w, dtype=torch.int8), (300.0, 2.0, 300, 3)),
    "a constant": (lambda x, w: x.clone().fill_(1e300) * w, (1.0, 2.0)),
}  # kernels refuse what a tensor has no room for


@pytest.mark.parametrize("name", ROOM)
def test_a_tensor_without_room_for_a_number_raises_what_it_raises_in_eager_mode(name: str) -> None:
    function, values = ROOM[name]

    def caught(x: torch.Tensor, w: float) -> Any:
        try:
            return function(x, w)
        except RuntimeError:
            return x - 1

    for step in (caught, function):
        for calls in (values, values[::-1], values[1:] + values):
            compared(step, calls, "aten")


class Counting:
    """What build() runs on in plain PyTorch."""

    n = 0
    total = 0.0


def divided_by_a_counter(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    try:
        return x * (1 / (3 - self.n))
    except ZeroDivisionError:
        return x - 1


def divided_downwards_by_a_counter(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    try:
        7 // (3 - self.n)  # which nobody takes
    except ZeroDivisionError:
        return x - 1
    return x * 2


def kept_in_a_book(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    try:
        self.total += 1 / (4 - self.n)
    except ZeroDivisionError:
        self.total -= 10.0
    return x * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "build",
    [divided_by_a_counter, divided_downwards_by_a_counter, kept_in_a_book],
    ids=lambda item: item.__name__,
)
def test_counters_raise_what_they_raise_in_eager_mode(build: Any, backend: str) -> None:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), Counting()
    graph.n, graph.total = 0, 0.0
    graph.config.backend(backend)
    for _ in range(7):
        assert bits(build(plain, X)) == bits(graph(X))
        assert (graph.n, graph.total) == (plain.n, plain.total)
    assert len(graph.builds) <= 3


class Slowing(torch.optim.Optimizer):
    """Its rate is one through `lr`; where there is none, it takes another one."""

    def __init__(self, parameters: Any, *, catches: bool) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.catches = catches

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("momentum", torch.zeros_like(parameter))
                state["momentum"].mul_(0.9).add_(parameter.grad)
                try:
                    rate = 0.01 / group["lr"]
                except ZeroDivisionError:
                    if not self.catches:
                        raise
                    rate = 0.5
                parameter.sub_(state["momentum"] * rate)


class Training:
    """Plain PyTorch: a model with dropout, its optimizer, and steps that may fail."""

    def __init__(self, *, catches: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3))
        self.optimizer = Slowing(self.model.parameters(), catches=catches)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(X).square().sum().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        momenta = [entries["momentum"] for entries in self.optimizer.state.values()]
        return [item.detach().clone() for item in (*self.model.parameters(), *momenta, torch.get_rng_state())]

    def state(self) -> list[Any]:
        return [bits(item) for item in self.tensors()]


def graph_of(training: Training, backend: str) -> mg.Graph:
    class Train(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            self.add_optimizer(training.optimizer)

        def build(self, x: torch.Tensor) -> None:
            self.model(x).square().sum().backward()

    graph = Train()
    graph.config.backend(backend)
    return graph


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rates", [(1.0, 2.0, 0.0, 3.0, 0.0), (0.0, 1.0, 0.0, 2.0)])
def test_numbers_of_an_optimizer_raise_what_they_raise_in_eager_mode(
    rates: tuple[float, ...], backend: str
) -> None:
    def trail(step: Callable[[], object], training: Training) -> list[list[torch.Tensor]]:
        found = []
        for rate in rates:
            training.optimizer.param_groups[0]["lr"] = rate
            step()
            found.append(training.tensors())
        return found

    plain = Training(catches=True)
    expected = trail(plain.step, plain)
    captured = Training(catches=True)
    graph = graph_of(captured, backend)
    # compiled, bits are those of the processor, and steps at a rate of a half make what was rounded grow
    most = 0.0 if backend == "aten" else 1e-5
    torch.testing.assert_close(trail(lambda: graph(X), captured), expected, rtol=most, atol=most)
    assert len(graph.builds) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_raises_changes_nothing(backend: str) -> None:
    training = Training(catches=False)
    graph = graph_of(training, backend)
    graph(X)
    graph(X)
    before = training.state()
    for _ in range(2):
        training.optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(ZeroDivisionError):
            graph(X)
        assert training.state() == before
    training.optimizer.param_groups[0]["lr"] = 1.0
    graph(X)
    assert len(graph.builds) == 1
