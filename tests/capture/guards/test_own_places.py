"""Tensors that a step puts in the place of others: who kept those before still has their numbers, as in eager mode."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import monograph as mg


class Layer(nn.Linear):
    """It differs in eval() mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 2)


class Cell(nn.Module):
    """A layer that goes on from what it left behind in its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4, 4)
        self.start()

    def start(self) -> None:
        self.place(torch.zeros(2, 4))

    def place(self, h: Tensor) -> None:
        self.h = h

    def kept(self) -> Any:
        return self.h

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x) + tree_leaves(self.kept())[0])
        self.place(made.detach())
        return made


class InBuffer(Cell):
    def start(self) -> None:
        self.register_buffer("h", torch.zeros(2, 4))


class Plain:
    """An object."""


class InObject(Cell):
    def start(self) -> None:
        self.memory = Plain()
        super().start()

    def place(self, h: Tensor) -> None:
        self.memory.h = h  # type: ignore[attr-defined]

    def kept(self) -> Any:
        return self.memory.h  # type: ignore[attr-defined]


class InDict(Cell):
    def start(self) -> None:
        self.memory: dict[str, Tensor] = {}
        super().start()

    def place(self, h: Tensor) -> None:
        self.memory["h"] = h

    def kept(self) -> Any:
        return self.memory["h"]


class InList(Cell):
    def start(self) -> None:
        self.memory = [torch.zeros(2, 4)]

    def place(self, h: Tensor) -> None:
        self.memory[0] = h

    def kept(self) -> Any:
        return self.memory[0]


class InTuple(Cell):
    def place(self, h: Tensor) -> None:
        self.h = (h, h * 2)  # type: ignore[assignment]


Pair = namedtuple("Pair", "now before")


class InNamedTuple(Cell):
    def place(self, h: Tensor) -> None:
        self.h = Pair(h, self.h.now if isinstance(getattr(self, "h", None), Pair) else h * 2)  # type: ignore


class InNewDict(Cell):
    def place(self, h: Tensor) -> None:
        self.h = {"h": h, "count": 3}  # type: ignore[assignment]


class InQueue(Cell):
    def start(self) -> None:
        self.h = [torch.full((2, 4), 0.1 * number) for number in range(3)]  # type: ignore[assignment]

    def place(self, h: Tensor) -> None:
        self.h = [*self.h[1:], h]  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x) + sum(self.h))
        self.place(made.detach())
        return made


class Exchanged(Cell):
    def start(self) -> None:
        self.h, self.other = torch.zeros(2, 4), torch.ones(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x) + self.h)
        self.h, self.other = self.other, self.h
        return made


CELLS = [
    *(Cell, InBuffer, InObject, InDict, InList, InTuple, InNamedTuple, InNewDict, InQueue, Exchanged),
]


def leaves(value: Any) -> list[Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, Tensor)]


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "views": lambda value: [item[0] for item in leaves(value)],
    "detached": lambda value: [item.detach() for item in leaves(value)],
    "arrays": lambda value: [item.numpy() for item in leaves(value)],
    "nothing": lambda value: [],
}


class Train(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss


def eager_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same step in plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def pair(kind: type[Cell]) -> tuple[Cell, Cell]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    return models[0], models[1]


def same(mine: Any, theirs: Any) -> bool:
    pairs = zip(tree_leaves(mine), tree_leaves(theirs), strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CELLS)
def test_who_kept_what_was_there_still_has_it(kind: type[Cell], way: str) -> None:
    mine, theirs = pair(kind)
    graph, eager = Train(mine), eager_step(theirs)
    kept: list[tuple[Any, Any]] = []
    for step in range(8):
        training = step not in (4, 5)
        mine.train(training)
        theirs.train(training)
        x = torch.randn(2, 4)
        assert torch.equal(graph(x), eager(x))
        kept.append((WAYS[way](mine.kept()), WAYS[way](theirs.kept())))
    assert all(same(*item) for item in kept)
    assert len(graph.builds) == 2  # one in each mode


@pytest.mark.parametrize("kind", CELLS[:8])
def test_a_beginning_that_is_put_there_again_and_again_stays_as_it_is(kind: type[Cell]) -> None:
    mine, theirs = pair(kind)
    graph, eager = Train(mine), eager_step(theirs)
    beginning = torch.full((2, 4), 0.3)
    for step in range(9):
        if step % 3 == 0:
            mine.place(beginning)
            theirs.place(beginning.clone())
        x = torch.randn(2, 4)
        assert torch.equal(graph(x), eager(x))
    assert torch.equal(beginning, torch.full((2, 4), 0.3))
    assert len(graph.builds) == 1


def test_a_beginning_that_is_a_buffer_too() -> None:
    class Reset(Cell):
        def start(self) -> None:
            self.register_buffer("first", torch.full((2, 4), 0.3))
            self.h = self.first

    mine, theirs = pair(Reset)
    graph, eager = Train(mine), eager_step(theirs)
    for step in range(6):
        if step == 3:
            mine.h, theirs.h = mine.first, theirs.first
        x = torch.randn(2, 4)
        assert torch.equal(graph(x), eager(x))
        assert torch.equal(mine.first, torch.full((2, 4), 0.3))


def test_a_tensor_of_the_graph_itself() -> None:
    class Recurrent(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.zeros(3)

        def build(self, x: Tensor) -> Tensor:
            self.h = (self.h * 0.5 + x).detach()
            return self.h * 2

    graph, h = Recurrent(), torch.zeros(3)
    seen, expected = [], []
    for _ in range(5):
        x = torch.randn(3)
        h = h * 0.5 + x
        assert torch.equal(graph(x), h * 2)
        seen.append(graph.h)
        expected.append(h)
    assert all(map(torch.equal, seen, expected))
    assert len(graph.builds) == 1


def test_steps_write_into_one_tensor_while_nobody_else_has_it() -> None:
    model, _ = pair(Cell)
    graph = Train(model)
    x = torch.randn(2, 4)
    graph(x)
    places = set()
    for _ in range(4):
        graph(x)
        places.add(model.h.data_ptr())
    assert len(places) == 1


@pytest.mark.long
def test_compiled_steps() -> None:
    mine, theirs = pair(Cell)
    graph, eager = Train(mine), eager_step(theirs)
    graph.config.backend("inductor")
    beginning = torch.full((2, 4), 0.3)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        if step % 3 == 0:
            mine.place(beginning)
            theirs.place(beginning.clone())
        x = torch.randn(2, 4)
        torch.testing.assert_close(graph(x), eager(x))
        kept.append((mine.h, theirs.h))
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert [build.backend for build in graph.builds] == ["inductor"]
