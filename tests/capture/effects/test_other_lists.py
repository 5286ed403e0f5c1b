"""A list that a step only adds to is looked for at its place: a new one there has no build, one that counts elsewhere has."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg


class Plain:
    """What the step does, without a graph."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.5)
            self.model.bias.fill_(0.25)
        self.model.kept = []  # type: ignore[assignment]
        self.first: Any = []
        self.second: Any = []
        self.named: Any = {"loss": []}
        self.logs: Any = {"loss": [], "accuracy": []}
        self.read: Any = [1.0, 2.0]

    def build(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x).sum()
        self.first.append(out.detach())
        self.named["loss"].append(out.item())
        self.second.append("seen")
        self.logs["loss"].append(out.detach())
        self.logs["accuracy"].append(out.item() * 2)
        self.logs["loss"].append(len(self.read))
        self.first.append(len(self.read))
        self.model.kept.append(out.item())  # type: ignore[union-attr, operator]
        return out * self.read[0]

    __call__ = build


class Step(mg.Graph):
    build = Plain.build

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(vars(Plain()))


def lists_of(step: Any) -> list[Any]:
    found = step.first, step.second, step.named["loss"], step.read, step.model.kept, *step.logs.values()
    return [[item.item() if torch.is_tensor(item) else item for item in items] for items in found]


def both(change: Callable[[Any], object]) -> Step:
    """A graph that did the same as the plain step, before and after what is changed."""
    graph, plain = Step(), Plain()
    for step in (graph, plain):
        for number in range(2):
            step(torch.full((3, 2), float(number)))
    assert len(graph.builds) == 1
    results = []
    for step in (graph, plain):
        change(step)
        results.append([step(torch.full((3, 2), float(number))).item() for number in range(3)])
    assert results[0] == results[1]
    assert lists_of(graph) == lists_of(plain)
    return graph


def of_attribute(step: Any) -> None:
    step.first = []


def of_entry(step: Any) -> None:
    step.named["loss"] = [0.5]


def of_module(step: Any) -> None:
    step.model.kept = []


def of_all(step: Any) -> None:
    step.first, step.second, step.named["loss"], step.model.kept = [], [1], [2], [3]


def of_dict(step: Any) -> None:
    step.logs = {"loss": [], "accuracy": [1]}


def of_entry_of_the_dict(step: Any) -> None:
    step.logs["loss"] = [9]


def of_dict_and_lists(step: Any) -> None:
    step.logs, step.named = {"loss": [0], "accuracy": []}, {"loss": []}
    step.first, step.second = step.logs["loss"][1:], []


def exchanged(step: Any) -> None:
    step.first, step.second = step.second, step.first


@pytest.mark.parametrize(
    "change",
    [of_attribute, of_entry, of_module, of_all, of_dict, of_entry_of_the_dict, of_dict_and_lists, exchanged],
)
def test_a_new_list_has_no_build(change: Callable[[Any], object]) -> None:
    assert len(both(change).builds) == 1


def one_in_two_attributes(step: Any) -> None:
    step.second = step.first


def one_in_a_dict_too(step: Any) -> None:
    step.first = step.named["loss"]


def one_that_is_read(step: Any) -> None:
    step.second = step.read


def a_new_one_that_is_read(step: Any) -> None:
    step.second = step.read = [3.0]


def one_list_by_two_names(step: Any) -> None:
    items: list[Any] = []
    step.logs = {"loss": items, "accuracy": items}


def a_dict_with_a_list_that_is_elsewhere(step: Any) -> None:
    step.logs = {"loss": step.first, "accuracy": []}


def one_dict_in_two_attributes(step: Any) -> None:
    step.named = step.logs


def one_list_by_two_names_of_the_dict(step: Any) -> None:
    step.logs["loss"] = step.logs["accuracy"]


def a_list_that_is_elsewhere_in_the_dict(step: Any) -> None:
    step.logs["accuracy"] = step.read


def more_in_the_dict(step: Any) -> None:
    step.logs["more"] = [1]


def another_order_in_the_dict(step: Any) -> None:
    step.logs["loss"] = step.logs.pop("loss")


def a_dict_in_another_order(step: Any) -> None:
    step.logs = {"accuracy": [], "loss": []}


def a_dict_with_more(step: Any) -> None:
    step.logs = {"loss": [], "accuracy": [], "more": []}


class Sums(list[Any]):
    """Adds in its own way."""

    def append(self, item: Any) -> None:
        super().append([item])


def of_another_class(step: Any) -> None:
    step.second = Sums()


def a_deque(step: Any) -> None:
    step.second = deque(maxlen=1)


@pytest.mark.parametrize(
    "change",
    [
        one_in_two_attributes,
        one_in_a_dict_too,
        one_that_is_read,
        a_new_one_that_is_read,
        of_another_class,
        one_list_by_two_names,
        a_dict_with_a_list_that_is_elsewhere,
        a_dict_in_another_order,
        one_list_by_two_names_of_the_dict,
        more_in_the_dict,
        another_order_in_the_dict,
        a_dict_with_more,
        a_deque,
    ],
)
def test_a_list_that_counts_elsewhere_has_a_build(change: Callable[[Any], object]) -> None:
    assert len(both(change).builds) > 1


@pytest.mark.parametrize("change", [one_dict_in_two_attributes, a_list_that_is_elsewhere_in_the_dict])
def test_numbers_in_a_dict_that_counts_elsewhere_are_refused(change: Callable[[Any], object]) -> None:
    graph = Step()
    graph(torch.ones(3, 2))
    change(graph)
    with pytest.raises(
        mg.CaptureError, match=r"puts numbers that it reads out of tensors .* into graph\.(logs|named)"
    ):
        graph(torch.ones(3, 2))


def test_lists_that_were_left_are_not_kept_alive() -> None:
    graph = Step()
    graph(torch.ones(3, 2))
    item = Sums()  # lists themselves have no weak references
    graph.second.append(item)
    reference = weakref.ref(item)
    del item
    graph.second = []
    graph(torch.ones(3, 2))
    gc.collect()
    assert reference() is None
    assert len(graph.builds) == 1


def test_a_variable_of_a_function_gets_a_new_list() -> None:
    kept: list[float] = []

    class Closed(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x.sum().item())
            return x * 2

    graph = Closed()
    for _ in range(3):
        kept = []
        graph(torch.ones(3))
        graph(torch.ones(3) * 2)
        assert kept == [3.0, 6.0]
    assert len(graph.builds) == 1


def test_each_micro_batch_adds_to_the_list_that_is_there() -> None:
    class InParts(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 1)
            self.config.set_gradient_accumulation_steps(2)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))
            self.seen: list[int] = []

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).mean()
            loss.backward()
            self.seen.append(1)
            return loss

    graph = InParts()
    for _ in range(2):
        graph.seen = []
        graph(torch.ones(4, 2))
        assert graph.seen == [1, 1]
    assert len(graph.builds) == 1


class InTurns(mg.Graph):
    """Adds to one list of a dict, which it may have together with other graphs and with the script."""

    def __init__(self, logs: dict[str, Any], name: str) -> None:
        super().__init__()
        self.logs, self.turn = logs, name

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.logs[self.turn].append(x.sum().item())
        self.logs[f"{self.turn}/rows"].append(len(x))
        return x * 2


def test_lists_beside_it_in_the_dict_may_grow_and_be_replaced() -> None:
    names = ("first", "second")
    logs: dict[str, Any] = {name: [] for name in (*names, *(f"{name}/rows" for name in names), "epochs")}
    graphs = [InTurns(logs, name) for name in names]
    for number in range(4):
        for graph in graphs:
            graph(torch.full((3,), float(number)))
        logs["epochs"].append(number)
        if number == 2:
            logs["epochs"] = []
    assert [len(graph.builds) for graph in graphs] == [1, 1]
    assert logs == {name: [0.0, 3.0, 6.0, 9.0] for name in names} | {
        f"{name}/rows": [3] * 4 for name in names
    } | {"epochs": [3]}


def test_a_list_beside_it_that_is_read_has_a_build_for_each_content() -> None:
    class Reads(InTurns):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.logs["loss"].append(x.sum().item())
            return x * len(self.logs["epochs"])

    graph = Reads({"loss": [], "epochs": []}, "loss")
    for number in range(3):
        assert graph(torch.ones(2)).tolist() == [number] * 2
        graph.logs["epochs"].append(number)
    assert len(graph.builds) > 1


def test_a_list_in_a_dict_of_dicts_is_added_to_beside_others() -> None:
    class History(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.history: dict[str, Any] = {"train": {"loss": []}, "val": {"loss": []}, "rows": [[], []]}

        def build(self, x: torch.Tensor) -> torch.Tensor:
            train = self.history["train"]
            train["loss"].append(x.sum().item())
            self.history["rows"][0].append(len(x))
            return x * 2

    graph = History()
    for number in range(3):
        graph(torch.full((3,), float(number)))
        graph.history["val"]["loss"].append(number)
        graph.history["rows"][1].append("seen")
    assert graph.history["train"] == {"loss": [0.0, 3.0, 6.0]}
    assert graph.history["rows"] == [[3, 3, 3], ["seen"] * 3]
    assert len(graph.builds) == 1
