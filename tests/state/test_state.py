"""State that forward keeps in attributes: carried, swapped, shared, nested in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.parity.test_features import batch, loss, mlp
from tests.support import assert_same, train_eagerly
from tests.support.case import Case, TrainStep, check, make_batches, make_side, nothing


class Stateful(nn.Module):
    """A model whose forward is a function of itself, and whose state is made by another."""

    def __init__(
        self, start: Callable[[Any], None], step: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.net = mlp()
        self.step = step
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def zeros() -> torch.Tensor:
    return torch.zeros(6, 4)


# --- pairs, lists, dicts ---------------------------------------------------------------------------------------------


def two_zeros(m: Any) -> None:
    m.hidden = (zeros(), zeros())


def one_zero_twice(m: Any) -> None:
    m.hidden = (zeros(),) * 2


def none(m: Any) -> None:
    m.hidden = None


def recur(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, c = m.hidden if m.hidden is not None else (torch.zeros(6, 4), torch.zeros(6, 4))
    h = torch.tanh(h + x)
    c = c + h
    m.hidden = (h.detach(), c.detach())
    return m.net(h + c)


def memory(m: Any) -> None:
    m.memory = [zeros(), zeros()]


def remember(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + m.memory[0]
    m.memory[0] = y.detach()
    m.memory[1].mul_(0.5).add_(x)
    return m.net(y + m.memory[1])


def nest(m: Any) -> None:
    m.nest = {"a": zeros(), "b": {"n": torch.zeros(()), "name": "b"}}


def use_nest(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.nest["a"] = m.nest["a"] * 0.5 + x
    m.nest["b"]["n"] = x.mean()
    return m.net(m.nest["a"]) + m.nest["b"]["n"]


# --- attributes that become one another ------------------------------------------------------------------------------


def tied(m: Any) -> None:
    m.h = m.c = zeros()


def untie(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.h + x)
    m.c = m.c + y.detach()
    m.h = y.detach()
    return m.net(y + m.c)


def two(m: Any) -> None:
    m.a, m.b = zeros(), torch.ones(6, 4)


def two_buffers(m: Any) -> None:
    m.register_buffer("a", zeros())
    m.register_buffer("b", torch.ones(6, 4))


def swap(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a, m.b = m.b, m.a
    return m.net(x + m.a)


def shift(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.b = m.a
    m.a = x
    return m.net(x + m.b)


def show(m: Any, x: torch.Tensor) -> torch.Tensor:
    """`b` becomes a view of the old `a`, which gets another value."""
    m.b = m.a.t().t()
    m.a = m.a + x
    return m.net(x + m.b)


def keep_arguments(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.x, m.row, m.alone = x, x[0], x.detach()
    return m.net(x)


def make_late(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "cache"):
        m.cache = torch.zeros(6, 4)
    m.cache = m.cache * 0.5 + x
    return m.net(m.cache)


def keep_and_return(m: Any, x: torch.Tensor) -> torch.Tensor:
    old, row = m.a, m.a[0]
    m.a = torch.tanh(m.a + x).detach()
    m.kept = old
    m.row = row * 1.0
    return m.net(old + x)


def start_late(m: Any) -> None:
    m.ready, m.kind = False, None


def settle(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The first step finds out what the others know: a scale from data, and a name."""
    if not m.ready:
        m.scale = x.detach().std()
        m.ready = True
    if m.kind is None:
        m.kind = "regression"
    return m.net(x / m.scale) * (1.0 if m.kind == "regression" else 2.0)


def names(*attributes: str) -> Callable[[Any], Any]:
    return lambda m: [list(v) if isinstance(v := getattr(m, name), tuple) else v for name in attributes]


def reset(m: Any, _index: int) -> None:
    m.hidden = (zeros(), zeros())


CASES = (
    Case("tuple", lambda: Stateful(two_zeros, recur), batch, loss, also=names("hidden")),
    # a pair that is one tensor twice, or nothing yet, gets its own memory in the first step
    Case(
        "tuple_shared", lambda: Stateful(one_zero_twice, recur), batch, loss, also=names("hidden"), builds=2
    ),
    Case("tuple_from_none", lambda: Stateful(none, recur), batch, loss, also=names("hidden"), builds=2),
    Case("list", lambda: Stateful(memory, remember), batch, loss, also=names("memory")),
    Case(
        "dict",
        lambda: Stateful(nest, use_nest),
        batch,
        loss,
        also=lambda m: [m.nest["a"], m.nest["b"]["n"], m.nest["b"]["name"]],
    ),
    Case("tied", lambda: Stateful(tied, untie), batch, loss, also=names("h", "c"), builds=2),
    Case("swapped", lambda: Stateful(two, swap), batch, loss, also=names("a", "b")),
    Case("shifted", lambda: Stateful(two, shift), batch, loss, also=names("a", "b")),
    Case("shifted_buffers", lambda: Stateful(two_buffers, shift), batch, loss),
    Case("view_of_state", lambda: Stateful(two, show), batch, loss, also=names("a", "b")),
    Case(
        "arguments_kept",
        lambda: Stateful(nothing, keep_arguments),
        batch,
        loss,
        also=names("x", "row", "alone"),
    ),
    Case(
        "made_in_the_first_step",
        lambda: Stateful(nothing, make_late),
        batch,
        loss,
        also=names("cache"),
        builds=2,
    ),
    Case(
        "settled_in_the_first_step",
        lambda: Stateful(start_late, settle),
        batch,
        loss,
        also=names("ready", "kind", "scale"),
        builds=2,
    ),
    Case(
        "old_value_kept", lambda: Stateful(two, keep_and_return), batch, loss, also=names("a", "kept", "row")
    ),
    Case("reset_by_hand", lambda: Stateful(two_zeros, recur), batch, loss, between=reset, builds=None),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_in_attributes_keeps_eager_bits(case: Case) -> None:
    check(case)


def test_an_old_value_is_returned_as_it_was() -> None:
    class Step(mg.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def build(self, x):
            return advance(self.model, x)

    def advance(model: Any, x: torch.Tensor) -> Any:
        old = model.a, model.a[1:], model.b
        model.a = model.a + x
        model.b.add_(1.0)
        return old

    eager, graph = Stateful(two_buffers, shift), Stateful(two_buffers, shift)
    step = Step(graph)
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        assert_same(list(advance(eager, x)), list(step(x)))
        assert_same([eager.a, eager.b], [graph.a, graph.b])
    assert len(step.builds) == 1


def test_settling_waits_for_the_first_step() -> None:
    """Compiling ahead changes no attribute, and the first step is the one that settles."""
    eager, graph = (
        make_side(Case("late", lambda: Stateful(start_late, settle), batch, loss)) for _ in range(2)
    )
    step = TrainStep(Case("late", lambda: graph.model, batch, loss), graph)
    batches = make_batches(Case("late", lambda: graph.model, batch, loss), 3)
    step.compile(*batches[0])
    assert (graph.model.ready, graph.model.kind, hasattr(graph.model, "scale")) == (False, None, False)
    expected = train_eagerly(eager, loss, batches)
    torch.manual_seed(0)
    for one, state in zip(batches, expected, strict=True):
        assert_same(state["loss"], step(*one))
        assert_same(state["model"], graph.state()["model"])
    assert "changed from" in step.builds[1].reason


def test_a_count_in_python_keeps_eager_bits() -> None:
    """Each step begins with another count."""

    def count(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.n += 1
        return m.net(x) * m.n

    def start(m: Any) -> None:
        m.n = 0

    check(Case("count", lambda: Stateful(start, count), batch, loss, also=names("n"), builds=None))


def test_a_list_that_grows() -> None:

    def log(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.log.append(x.mean())
        return m.net(x)

    def start(m: Any) -> None:
        m.log = []

    step = check(Case("log", lambda: Stateful(start, log), batch, loss))
    assert len(step.builds) == 1
    assert len(step.model.log) > 1
    assert len(set(map(id, step.model.log))) == len(step.model.log)
