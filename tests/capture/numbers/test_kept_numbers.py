"""Numbers that a step reads out of what it computes, and keeps in Python objects: eager's numbers, and no new builds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


class Meter:
    def __init__(self) -> None:
        self.sum, self.count, self.best = 0.0, 0, math.inf

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count

    @property
    def average(self) -> float:
        return self.sum / self.count


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Watched(nn.Linear):
    """A layer that keeps books of its own."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.largest, self.mean = 0.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.largest = out.max().item()
        self.mean = 0.9 * self.mean + 0.1 * out.mean().item()
        return out


class Classwide:
    total = 0.0


METER, TOTAL = Meter(), 0.0


class Books:
    """What both sides keep."""

    def __init__(self) -> None:
        self.last, self.total, self.n, self.correct = 0.0, 0.0, 0, 0
        self.history: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.row = [0.0, 0.0]
        self.meter, self.slotted, self.space = Meter(), Slotted(), SimpleNamespace()


Keep = Callable[[Books, torch.Tensor, torch.Tensor, torch.Tensor], Any]


def an_attribute(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.last = loss.item()


def a_sum(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.total += loss.item()


def a_running_mean(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.n += 1
    books.total = books.total + (loss.item() - books.total) / books.n


def a_decaying_mean(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.total = 0.9 * books.total + (1 - 0.9) * loss.item()


def a_list(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.history.append(loss.item())


def pairs_in_a_list(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.history.extend([loss.item(), out.sum().item() / 2])


def the_perplexity(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.last = math.exp(loss.item())


def an_accuracy(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.correct += (out.argmax(1) == 0).sum().item()
    books.n += len(out)
    books.last = books.correct / books.n


def a_dict(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.metrics["loss"] = loss.item()


def several_in_a_dict(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.metrics.update(first=out.max().item(), kind="train", loss=loss.item(), rows=len(out))


def a_sum_in_a_dict(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.metrics["loss"] = books.metrics.get("loss", 0.0) + loss.item()


def an_item_of_a_list(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.row[1] = loss.item()


def a_meter(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.meter.update(loss.item(), len(x))
    books.last = books.meter.average


def a_slot(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.slotted.value += loss.item()


def a_new_attribute(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.space.loss = loss.item()


def of_an_argument(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    books.history.append(x.max().item())
    books.last = x.sum().item() * loss.item()


def before_it_is_overwritten(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    found = out.detach().clone()
    books.last = found.sum().item()
    found.zero_()
    books.total = found.sum().item()


def also_used_in_the_step(
    books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    scale = loss.item()
    books.last = scale
    return out * (1.0 / (1.0 + scale * scale))


def powers_and_signs(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    value = loss.item()
    books.last, books.total = -abs(value**2 - 3), value % 0.25


WAYS: list[Keep] = [
    an_attribute,
    a_sum,
    a_running_mean,
    a_decaying_mean,
    a_list,
    pairs_in_a_list,
    the_perplexity,
    an_accuracy,
    a_dict,
    several_in_a_dict,
    a_sum_in_a_dict,
    an_item_of_a_list,
    a_meter,
    a_slot,
    a_new_attribute,
    of_an_argument,
    before_it_is_overwritten,
    also_used_in_the_step,
    powers_and_signs,
]


def plain_model() -> tuple[Watched, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Watched()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Step(mg.Graph):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.model, optimizer = plain_model()
        self.add_optimizer(optimizer)
        self.books, self.keep = Books(), keep

    def build(self, x: torch.Tensor) -> Any:
        out = self.model(x)
        loss = out.square().mean()
        loss.backward()
        return loss, self.keep(self.books, loss, out, x)


def told(books: Books) -> str:
    meters = [vars(books.meter), vars(books.space), books.slotted.value]
    plain = {name: item for name, item in vars(books).items() if name not in ("meter", "slotted", "space")}
    return repr((plain, meters))


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("keep", WAYS, ids=lambda way: way.__name__)
def test_numbers_that_the_step_computes(keep: Keep) -> None:
    graph, books = Step(keep), Books()
    model, optimizer = plain_model()
    for x in batches(8):
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        expected = loss, keep(books, loss, out, x)
        optimizer.step()
        assert_same(tuple(i for i in expected if i is not None), tuple(i for i in graph(x) if i is not None))
        assert told(graph.books) == told(books)
        assert (graph.model.largest, graph.model.mean) == (model.largest, model.mean)
    assert_same(dict(model.state_dict()), dict(graph.model.state_dict()))
    assert len(graph.builds) <= 2


def test_objects_that_the_graph_does_not_hold() -> None:
    class Global(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 3)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            global TOTAL
            loss = self.model(x).sum()
            METER.update(loss.item(), len(x))
            TOTAL += loss.item()
            Classwide.total = Classwide.total + loss.item()
            return loss

    graph = Global()
    meter, total = Meter(), 0.0
    for x in batches(6):
        loss = graph.model(x).sum().item()
        meter.update(loss, len(x))
        total += loss
        graph(x)
        assert (METER.sum, METER.count, TOTAL, Classwide.total) == (meter.sum, meter.count, total, total)
    assert len(graph.builds) <= 2


def a_meter_and_the_perplexity(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    a_meter(books, loss, out, x)
    books.total = math.exp(loss.item())


@pytest.mark.long
def test_compiled() -> None:
    graph, books = Step(a_meter_and_the_perplexity), Books()
    graph.config.backend("inductor")
    model, optimizer = plain_model()
    for x in batches(3):
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        a_meter_and_the_perplexity(books, loss, out, x)
        optimizer.step()
        graph(x)
        for name in ("last", "total"):
            assert math.isclose(getattr(graph.books, name), getattr(books, name), rel_tol=1e-6)
        assert math.isclose(graph.model.largest, model.largest, rel_tol=1e-6)
    total, count = graph.books.total, graph.books.meter.count
    with pytest.raises(OverflowError):
        graph(batches(1)[0] * 1e2)
    assert (graph.books.total, graph.books.meter.count) == (total, count + 5)  # all else is done
    graph.compile(x)
    assert len(graph.builds) <= 2


DECISIONS: dict[str, Callable[[float], Any]] = {
    "a branch": lambda value: 1 if value > 0.5 else 2,
    "a truth value": lambda value: bool(value),
    "the larger": lambda value: max(0.5, value),
    "a text": lambda value: f"{value:.3f}",
    "a print": lambda value: print(value),
    "whole numbers": lambda value: range(int(value)),
    "a key": lambda value: {value: 1},
    "rounded": lambda value: round(value, 2),
}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS.keys())
def test_what_python_decides_on_them_is_refused(decide: Callable[[float], Any]) -> None:
    def keep(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
        decide(loss.item())

    graph = Step(keep)
    before = {name: item.clone() for name, item in graph.model.state_dict().items()}
    with pytest.raises(mg.DataDependentError, match="asked for the value of a tensor") as caught:
        graph(torch.ones(2, 4))
    assert "test_kept_numbers.py" in str(caught.value)
    assert_same(before, dict(graph.model.state_dict()))
    assert told(graph.books) == told(Books())


@pytest.mark.parametrize("convert", [float, int, bool])
def test_a_conversion_of_the_tensor_itself_names_the_way(convert: Callable[[Any], Any]) -> None:
    def keep(books: Books, loss: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
        books.last = convert(loss.detach())

    with pytest.raises(mg.DataDependentError, match=r"\.item\(\)"):
        Step(keep)(torch.ones(2, 4))


def test_a_number_that_cannot_be_computed_changes_nothing() -> None:
    graph = Step(the_perplexity)
    x = batches(1)[0]
    graph(x)
    state = {name: item.clone() for name, item in graph.model.state_dict().items()}
    last, largest = graph.books.last, graph.model.largest
    with pytest.raises(OverflowError) as caught:
        graph(x * 1e4)
    assert "graph.books.last" in "".join(caught.value.__notes__)
    assert_same(state, dict(graph.model.state_dict()))
    assert (graph.books.last, graph.model.largest) == (last, largest)
    graph(x)
    assert len(graph.builds) == 1


def test_a_step_that_keeps_numbers_is_verified_and_goes_on() -> None:
    graph = Step(a_meter)
    xs = batches(4)
    graph(xs[0])
    before = told(graph.books)
    report = graph.verify(xs[1])
    assert report.ok, str(report)
    assert told(graph.books) == before
    state = copy.deepcopy(graph.state_dict())
    graph(xs[1])
    other = Step(a_meter)
    other.load_state_dict(state)
    other(xs[1])
    assert_same(dict(graph.model.state_dict()), dict(other.model.state_dict()))


def test_in_micro_batches_they_are_refused() -> None:
    graph = Step(an_attribute)
    graph.config.set_gradient_accumulation_steps(2)
    with pytest.raises(mg.CaptureError, match=r"model\.\w+, and no replay can do that for each micro-batch"):
        graph(torch.ones(4, 4))
    assert told(graph.books) == told(Books())
