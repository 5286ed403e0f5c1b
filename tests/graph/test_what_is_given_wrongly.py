"""Messages name what was given wrongly in a few words, whatever it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.config import GraphConfig
from monograph.errors import shown
from monograph.testing import align

LONG = 400  # letters
SETTERS = {
    name: setter
    for name, setter in inspect.getmembers(GraphConfig, inspect.isfunction)
    if not name.startswith("_") and name != "add_pass" and len(inspect.signature(setter).parameters) > 1
}


def made() -> mg.Graph:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("aten")
    step(torch.ones(2, 4), torch.ones(2, 4))
    return step


@pytest.fixture(scope="module")
def step() -> mg.Graph:
    return made()


@pytest.mark.parametrize("name", SETTERS)
def test_settings(name: str, step: mg.Graph) -> None:
    parameters = list(inspect.signature(SETTERS[name]).parameters.values())[1:]
    needed = [
        item for item in parameters if item.default is item.empty and item.kind is not item.VAR_POSITIONAL
    ]
    with pytest.raises((mg.MonographError, TypeError)) as caught:
        getattr(GraphConfig(), name)(*[step] * max(len(needed), 1))
    assert len(str(caught.value)) < LONG


WRONG: dict[str, Callable[[mg.Graph, Any, Tensor], Any]] = {
    "verify": lambda step, item, x: step.verify(x, x, against=item),
    "verify steps": lambda step, item, x: step.verify(x, x, steps=item),
    "diff": lambda step, item, x: step.diff(item),
    "show": lambda step, item, x: step.show(item),
    "show module": lambda step, item, x: step.show(module=item),
    "draw": lambda step, item, x: step.draw("step.svg", module=item),
    "draw depth": lambda step, item, x: step.draw("step.svg", depth=item),
    "debug": lambda step, item, x: step.debug(item),
    "debug ranks": lambda step, item, x: step.debug(0, ranks=item),
    "max_batch": lambda step, item, x: step.max_batch(x, x, memory=item),
    "backend": lambda step, item, x: step.config.backend(item),
    "max_builds": lambda step, item, x: mg.assert_max_builds(item).__enter__(),
    "replay": lambda step, item, x: step.replay(x, x)[item],  # type: ignore[index]
    "buckets": lambda step, item, x: mg.buckets(item, dim=0, sizes=[4]),
    "buckets dim": lambda step, item, x: mg.buckets("x", dim=item, sizes=[4]),
    "buckets sizes": lambda step, item, x: mg.buckets("x", dim=0, sizes=item),
    "buckets pad": lambda step, item, x: mg.buckets("x", dim=0, sizes=[4], pad=item),
    "align": lambda step, item, x: align(item, x),
    "align against": lambda step, item, x: align(torch.sin, x, against=item),
    "align calls": lambda step, item, x: align(torch.sin, x, calls=item),
    "align seed": lambda step, item, x: align(torch.sin, x, seed=item),
}


@pytest.mark.parametrize("what", WRONG)
def test_methods(what: str, step: mg.Graph) -> None:
    with pytest.raises((mg.MonographError, TypeError, ValueError)) as caught:
        WRONG[what](step, step, torch.ones(2, 4))
    assert len(str(caught.value)) < LONG


def test_two_graphs_are_compared_by_their_modules(step: mg.Graph) -> None:
    for arguments in ((step,), (torch.sin,)):
        with pytest.raises(TypeError, match=f"graph {step.name}: "):
            align(*arguments, torch.ones(2, 4), against=step)


def test_how_objects_are_named(step: mg.Graph) -> None:
    assert shown("a") == "'a'"
    assert shown(3) == "3"
    assert shown(step) == f"<TrainGraph {step.name}>"
    assert shown(nn.Sequential(nn.Linear(2, 2))) == "<Sequential>"
    assert shown(torch.ones(50, 50)) == "<Tensor>"
    assert shown("a" * 1000) == "<str>"
