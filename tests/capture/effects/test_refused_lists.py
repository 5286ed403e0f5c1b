"""A list that got numbers of the step and that no replay can extend: the error is at the line that does more than append."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(4, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).square().mean()
        return out


def keep(items: list[float], value: float) -> None:
    items.append(value)


def by_length(step: Any, loss: torch.Tensor) -> Any:
    step.losses.append(loss.item())
    return loss * len(step.losses)  # here


def by_adding_a_list(step: Any, loss: torch.Tensor) -> Any:
    step.losses += [loss.item()]  # here
    return loss


def by_taking_out(step: Any, loss: torch.Tensor) -> Any:
    step.losses.append(loss.item())
    if len(step.losses) > 3:  # here
        step.losses.pop(0)
    return loss


def by_inserting(step: Any, loss: torch.Tensor) -> Any:
    step.losses.insert(0, loss.item())  # here
    return loss


def by_a_function(step: Any, loss: torch.Tensor) -> Any:
    keep(step.losses, loss.item())  # here
    return loss


def of_the_model(step: Any, loss: torch.Tensor) -> Any:
    step.model.losses.append(loss.item())
    return loss * len(step.model.losses)  # here


def in_a_dict(step: Any, loss: torch.Tensor) -> Any:
    step.log["losses"].append(loss.item())
    return loss * len(step.log["losses"])  # here


def graph_of(use: Callable[[Any, torch.Tensor], Any]) -> Any:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.losses: list[float] = []
            self.log: dict[str, list[float]] = {"losses": []}

        def build(self, x: torch.Tensor) -> Any:
            loss = self.model(x)
            loss.backward()
            return use(self, loss)

    return Step()


USES = (by_length, by_adding_a_list, by_taking_out, by_inserting, by_a_function, of_the_model, in_a_dict)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_line_that_does_more_than_to_append(use: Callable[[Any, torch.Tensor], Any]) -> None:
    step = graph_of(use)
    with pytest.raises(mg.CaptureError, match="no replay can repeat: ") as caught:
        step(X)
    lines, first = inspect.getsourcelines(use)
    here = next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))
    where = caught.value.where
    assert where is not None
    if where.line == first + here:
        named = "this line"
    else:  # the one that puts the number there
        named = f"line {first + here}, {lines[here].strip()!r},"
        assert "pop" in lines[where.line - first]
    assert f"{named} does more with" in str(caught.value)
    name = {of_the_model: "model.losses", in_a_dict: "graph.log['losses']"}.get(use, "graph.losses")
    assert f"with {name} than to call its append()" in str(caught.value)
    assert ("or with graph.log than to take entries by their keys" in str(caught.value)) == (use is in_a_dict)
    assert step.losses == step.model.losses == step.log["losses"] == []


def test_build_appends_to_a_list_of_the_model() -> None:
    def use(step: Any, loss: torch.Tensor) -> Any:
        step.model.losses.append(loss.item())
        return loss

    torch.manual_seed(0)
    step = graph_of(use)
    results = [step(X).item() for _ in range(4)]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert step.model.losses == results == expected
    assert len(step.builds) == 1


def test_what_is_printed_costs_no_build(capfd: pytest.CaptureFixture[str]) -> None:
    """Streams of the process get what a step prints when it is captured."""

    class Telling(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            print("a text")
            print("an error", file=sys.stderr)
            sys.stdout.write("a line\n")
            return x + 1

    step = Telling()
    for _ in range(3):
        step(X)
    assert len(step.builds) == 1
    out, err = capfd.readouterr()
    assert (out.count("a text"), out.count("a line"), err.count("an error")) == (1, 1, 1)
