"""Objects that a step makes and forgets are no facts: no build for each step."""

from __future__ import annotations

import abc
import copy
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

import monograph as mg
from monograph.capture.guards.sources.attributes import class_table
from monograph.capture.guards.sources.places import ClassEntries
from tests.capture.numbers.books import (
    X,
    _outside_as_before,  # noqa: F401
    sides,
)
from tests.support import assert_same


def other(owner: Any) -> float:
    log = owner.losses
    return float(log[-1])


class Aliased:
    """Looks up its attributes under other names, as configurations of libraries do."""

    aliases = {"width": "d_model"}  # noqa: RUF012

    def __init__(self) -> None:
        self.d_model, self.decoder_layers, self.names = 3, 2, {0: "zero"}

    def __getattribute__(self, name: str) -> Any:
        if name != "aliases" and name in super().__getattribute__("aliases"):
            name = super().__getattribute__("aliases")[name]
        return super().__getattribute__(name)

    def of_decoder(self) -> Any:
        made = copy.deepcopy(self)
        for name in list(vars(made)):
            if name.startswith("decoder_"):
                setattr(made, name.removeprefix("decoder_"), getattr(made, name))
                delattr(made, name)
        made.names[1] = "one"
        return made


def copied_settings(self: Any, x: torch.Tensor) -> Any:
    return x * self.aliased.of_decoder().layers * len(self.aliased.names)


def kept_settings(self: Any, x: torch.Tensor) -> Any:
    found = x * self.aliased.width
    self.aliased = self.aliased.of_decoder()
    self.aliased.d_model += 1
    self.aliased.decoder_layers = 2
    return found


def test_a_copy_that_a_step_makes_and_forgets_costs_no_build() -> None:
    graph, plain = sides(copied_settings)
    graph.aliased, plain.aliased = Aliased(), Aliased()
    for step in range(6):
        if step == 3:
            graph.aliased.decoder_layers = plain.aliased.decoder_layers = 5
        assert_same(plain.build(X), graph(X), f"step {step}")
    assert len(graph.builds) == 2, [build.reason for build in graph.builds]


def test_a_copy_that_a_step_makes_and_keeps_is_eagers() -> None:
    graph, plain = sides(kept_settings)
    graph.aliased, plain.aliased = Aliased(), Aliased()
    for step in range(3):
        assert_same(plain.build(X), graph(X), f"step {step}")
        assert vars(plain.aliased) == vars(graph.aliased)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """What models of other libraries give: a dict that is filled from its fields, whose names are computed."""

    sample: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                self[item.name] = value


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return Output(sample=Output(sample=self.linear(x)).sample)


def test_outputs_that_a_step_makes_are_no_places_outside() -> None:
    decoder = Decoder()
    graph = mg.trace(lambda x: decoder(x).sample.sum())
    for factor in (1.0, 2.0, 3.0):
        x = torch.full((2, 3), factor)
        assert torch.equal(graph(x), decoder(x).sample.sum())
    assert len(graph.builds) == 1


class Seen(abc.ABC):  # noqa: B024 -- nothing has to be written for it
    """An abstract class, which keeps what it was asked about."""

    level = 2.0


def test_what_abstract_classes_remember_is_no_fact() -> None:
    whole = ClassEntries("Seen", class_table(Seen), set(), cls=Seen, whole=True)
    assert "level" in whole.now()
    assert "_abc_impl" not in whole.now()


def test_what_copies_leave_on_classes_is_no_fact() -> None:
    """Pickling and copying write `__slotnames__` into the class of whatever they meet for the first time."""

    class Scale:
        factor = 2.0

    class Net(nn.Linear):
        scale = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale.factor

    class Own(torch.optim.SGD):
        pass

    model = Net(3, 2)
    step = mg.train_graph(model, nn.MSELoss(), Own(model.parameters(), lr=0.1, momentum=0.9))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    for _ in range(3):
        step(x, y)
        copy.deepcopy((model, Scale()))
        copy.deepcopy(Own(model.parameters(), lr=0.1))
    assert "__slotnames__" in vars(Scale)
    assert len(step.builds) == 1
    Scale.factor = 3.0
    step(x, y)
    assert len(step.builds) == 2
