"""Tensors that a step moves from one place to another, returns, or only puts somewhere: after each step all is as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg

NUM_STEPS = 5


def lag(self: Any, x: Tensor) -> Tensor:
    result = x - self.a
    self.a = self.b
    self.b = x * 1
    return result


def swap(self: Any, x: Tensor) -> Tensor:
    self.a, self.b = self.b, self.a
    return self.a + x


def chain(self: Any, x: Tensor) -> Tensor:
    self.a = self.b
    self.b = self.c
    self.c = x * 1
    return self.a + x


def reset(self: Any, x: Tensor) -> Tensor:
    result = self.a + x
    self.a = self.c
    return result


def old(self: Any, x: Tensor) -> Tensor:
    before = self.a
    self.a = x * 1
    return before


def old_in_a_list(self: Any, x: Tensor) -> list[Tensor]:
    before = [self.b, self.a]
    self.b = self.a
    self.a = x * 1
    return before


def only_put(self: Any, x: Tensor) -> Tensor:
    self.a = (x * 2).detach()
    return x + 1


def put_and_returned(self: Any, x: Tensor) -> Tensor:
    self.a = x * 2
    return self.a


STEPS = (lag, swap, chain, reset, old, old_in_a_list, only_put, put_and_returned)


def start(self: Any) -> None:
    self.a, self.b, self.c = torch.zeros(2), torch.ones(2), torch.full((2,), 5.0)


class Plain:
    """An object that is no module."""


def in_graph(step: Callable[..., Any]) -> tuple[Any, Any]:
    class Holder(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            start(self)

        build = step

    graph = Holder()
    return graph, graph


def in_module(step: Callable[..., Any], *, buffers: bool = False) -> tuple[Any, Any]:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in "abc" if buffers else "":
                self.register_buffer(name, torch.zeros(2))
            start(self)

        forward = step

    class Around(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder()

        def build(self, x: Tensor) -> Any:
            return self.holder(x)

    graph = Around()
    return graph, graph.holder


def in_buffers(step: Callable[..., Any]) -> tuple[Any, Any]:
    return in_module(step, buffers=True)


def in_closure(step: Callable[..., Any]) -> tuple[Any, Any]:
    holder = Plain()
    start(holder)

    class Around(mg.Graph):
        def build(self, x: Tensor) -> Any:
            return step(holder, x)

    return Around(), holder


def plain(step: Callable[..., Any]) -> tuple[Any, Any]:
    holder = Plain()
    start(holder)
    return lambda x: step(holder, x), holder


def leaves(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list) else [result]


def seen(run: Callable[[Tensor], Any], holder: Any, *, keeps: bool) -> list[list[list[float]]]:
    """What a script sees after each step: the attributes, the result, and all that it has kept so far."""
    found, log = [], list[Tensor]()
    for number in range(NUM_STEPS):
        now = [*leaves(run(torch.full((2,), float(number + 1)))), holder.a, holder.b, holder.c]
        log += now if keeps else []
        found.append([item.tolist() for item in [*now, *log]])
    return found


@pytest.mark.parametrize("keeps", [False, True], ids=("alone", "kept"))
@pytest.mark.parametrize("place", [in_graph, in_module, in_buffers, in_closure])
@pytest.mark.parametrize("step", STEPS)
def test_after_each_step_all_is_as_in_plain_pytorch(
    step: Callable[..., Any], place: Callable[..., tuple[Any, Any]], keeps: bool
) -> None:
    graph, holder = place(step)
    assert seen(graph, holder, keeps=keeps) == seen(*plain(step), keeps=keeps)
    if place is in_graph:
        assert len(graph.builds) == 1


class Cell:
    """An object that is no module, with what it goes on from."""

    def __init__(self) -> None:
        self.state = torch.zeros(2), torch.ones(2)
        self.last = torch.zeros(2)
        self.num = 0

    def step(self, x: Tensor) -> Tensor:
        h, c = self.state
        h, c = h + x, c * 0.5 + h
        self.state = h, c
        return h + c

    def moved(self, x: Tensor) -> Tensor:
        result = x - self.state[0]
        self.state = self.state[1], x * 1
        return result

    def counted(self, x: Tensor) -> Tensor:
        self.last = self.last + x
        self.num += 1
        return self.last * self.num

    __call__ = step


def by_a_function(cell: Cell, name: str) -> Any:
    return mg.trace(lambda x: getattr(cell, name)(x))


def by_a_closure(cell: Cell, name: str) -> Any:
    class Around(mg.Graph):
        def build(self, x: Tensor) -> Any:
            return getattr(cell, name)(x)

    return Around()


def by_the_method(cell: Cell, name: str) -> Any:
    return mg.trace(getattr(cell, name))


def by_a_decorated_method(cell: Cell, name: str) -> Any:
    return mg.trace(torch.no_grad()(getattr(cell, name)))


@pytest.mark.parametrize("traced", [by_a_function, by_a_closure, by_the_method, by_a_decorated_method])
@pytest.mark.parametrize("name", ["step", "moved", "counted", "__call__"])
def test_an_object_goes_on_from_its_last_step(traced: Callable[[Cell, str], Any], name: str) -> None:
    cell, other = Cell(), Cell()
    graph = traced(cell, name)
    for number in range(NUM_STEPS):
        x = torch.full((2,), float(number))
        assert torch.equal(graph(x), getattr(other, name)(x))
        assert [item.tolist() for item in (*cell.state, cell.last)] == [
            item.tolist() for item in (*other.state, other.last)
        ]
    assert cell.num == other.num
    assert len(graph.builds) <= 2


def test_a_traced_object_goes_on_from_its_last_step() -> None:
    cell, other = Cell(), Cell()
    graph = mg.trace(cell)
    for number in range(NUM_STEPS):
        x = torch.full((2,), float(number))
        assert torch.equal(graph(x), other(x))
    assert len(graph.builds) == 1


def changed_and_moved(self: Any, x: Tensor) -> list[Tensor]:
    self.a.add_(x)
    before = self.a
    self.a, self.b = self.b, self.a
    return [before]


def changed_and_replaced(self: Any, x: Tensor) -> Tensor:
    before = self.a
    self.a = x * 2
    before.add_(x)
    return before


def one_at_two_places(self: Any, x: Tensor) -> Tensor:
    self.b = self.a
    self.a.add_(x)
    return self.b * 1


@pytest.mark.parametrize("keeps", [False, True], ids=("alone", "kept"))
@pytest.mark.parametrize("place", [in_graph, in_module, in_buffers, in_closure])
@pytest.mark.parametrize("step", [changed_and_moved, changed_and_replaced, one_at_two_places])
def test_a_tensor_that_changes_in_place_is_the_same_one_wherever_it_goes(
    step: Callable[..., Any], place: Callable[..., tuple[Any, Any]], keeps: bool
) -> None:
    graph, holder = place(step)
    assert seen(graph, holder, keeps=keeps) == seen(*plain(step), keeps=keeps)


@pytest.mark.parametrize("elsewhere", ["last", "log", "by name"])
def test_a_tensor_that_was_put_elsewhere_keeps_its_numbers(elsewhere: str) -> None:
    def kept_after_each_step(traced: bool) -> list[list[list[float]]]:
        other = Plain()
        other.last, other.log, other.names = torch.zeros(2), list[Tensor](), {"a": torch.zeros(2)}  # type: ignore[attr-defined]

        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("h", torch.zeros(2))

            def forward(self, x: Tensor) -> Tensor:
                if elsewhere == "last":
                    other.last = self.h  # type: ignore[attr-defined]
                elif elsewhere == "log":
                    other.log.append(self.h)  # type: ignore[attr-defined]
                else:
                    other.names["a"] = self.h  # type: ignore[attr-defined]
                self.h = self.h + x
                return self.h * 1

        run: Any = mg.trace(Holder()) if traced else Holder()
        found = []
        for number in range(NUM_STEPS):
            run(torch.full((2,), float(number)))
            found.append([item.tolist() for item in [other.last, *other.log, *other.names.values()]])  # type: ignore[attr-defined]
        return found

    assert kept_after_each_step(True) == kept_after_each_step(False)


def shows(self: Any, x: Tensor) -> Tensor:
    self.a.add_(x)
    self.b = self.a.view(2)
    return x * 1


def shows_in_turn(self: Any, x: Tensor) -> Tensor:
    self.c.add_(x)
    self.b = self.a.detach()
    self.a, self.c = self.c, self.a
    return x * 1


@pytest.mark.parametrize("keeps", [False, True], ids=("alone", "kept"))
@pytest.mark.parametrize("place", [in_graph, in_module, in_closure])
@pytest.mark.parametrize("step", [shows, shows_in_turn])
def test_a_view_shows_what_later_steps_and_the_script_write(
    step: Callable[..., Any], place: Callable[..., tuple[Any, Any]], keeps: bool
) -> None:
    def after_all(run: Callable[[Tensor], Any], holder: Any) -> list[Any]:
        found = seen(run, holder, keeps=keeps)
        holder.a.zero_()
        return [*found, holder.a.tolist(), holder.b.tolist()]

    assert after_all(*place(step)) == after_all(*plain(step))


def test_views_in_lists_tuples_and_dicts_show_what_is_written() -> None:
    def made(step: Callable[..., Any]) -> list[Any]:
        holder, log = Plain(), list[Tensor]()
        holder.rows, holder.parts, holder.names = torch.zeros(3, 2), (), {}  # type: ignore[attr-defined]
        found = []
        for number in range(NUM_STEPS):
            step(holder, log, torch.full((2,), float(number)))
            found.append([item.tolist() for item in (*log, *holder.parts, *holder.names.values())])  # type: ignore[attr-defined]
        return found

    def step(holder: Any, log: list[Tensor], x: Tensor) -> Tensor:
        holder.rows.add_(x)
        log.append(holder.rows[0])
        holder.parts = holder.rows[1], holder.rows[2] * 2
        holder.names["last"] = holder.rows[2]
        return x * 1

    graphs: dict[int, Any] = {}

    def traced(holder: Any, log: list[Tensor], x: Tensor) -> Tensor:
        graph = graphs.setdefault(id(holder), mg.trace(lambda x: step(holder, log, x)))
        result: Tensor = graph(x)
        return result

    assert made(traced) == made(step)


def test_a_view_that_is_to_change_what_it_shows_is_refused() -> None:
    def shown(self: Any, x: Tensor) -> Tensor:
        self.a.add_(x)
        self.a = self.b.detach()
        return x

    graph, _ = in_buffers(shown)
    with pytest.raises(mg.CaptureError, match="puts a view of another tensor"):
        graph(torch.zeros(2))
