"""The law of a state: training that continues from it takes the steps that it would have taken without a break."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

import monograph as mg
from tests.support import Side, assert_same
from tests.support.small import TrainStep, batches, eager_trail, graph_trail

STEPS, MORE = 3, 3
Make = Callable[[], Side]
Step = Callable[[Side], mg.Graph]


def whole(graph: mg.Graph, *, python_random: bool = False) -> dict[str, Any]:
    """A copy of the state, without what it says about the graph."""
    state = copy.deepcopy(_without_about(graph.state_dict(python_random=python_random)))
    if "numpy" in state["graph.rng"]:
        kind, keys, *others = state["graph.rng"]["numpy"]
        state["graph.rng"]["numpy"] = (kind, keys.tolist(), *others)
    return state


def untouched(make: Make, step_of: Step) -> tuple[Side, mg.Graph]:
    side = make()
    return side, step_of(side)


def compiled(make: Make, step_of: Step) -> tuple[Side, mg.Graph]:
    side, step = untouched(make, step_of)
    step.compile(*batches(1)[0])
    return side, step


def trained(make: Make, step_of: Step) -> tuple[Side, mg.Graph]:
    """One that went another way, and farther."""
    side, step = untouched(make, step_of)
    torch.manual_seed(99)
    for batch in reversed(batches(STEPS + MORE)[1:]):
        step(*batch)
    return side, step


def check_continuation(make: Make, step_of: Step = TrainStep, *, places: Any = None) -> None:
    """Continue from a state in the same graph, and in fresh, compiled and trained ones: plain PyTorch, bit for bit."""
    data = batches(STEPS + MORE)
    expected = eager_trail(make(), data)
    side, step = untouched(make, step_of)
    assert_same(expected[:STEPS], graph_trail(side, step, data[:STEPS]), "before")
    saved = copy.deepcopy(step.state_dict())
    assert_same(expected[STEPS:], graph_trail(side, step, data[STEPS:]), "without a break")
    end, builds = whole(step), len(step.builds)
    step.load_state_dict(saved)
    assert_same(expected[STEPS:], graph_trail(side, step, data[STEPS:]), "the same graph")
    assert_same(end, whole(step))
    assert len(step.builds) == builds, step.explain()
    for place in places or (untouched, compiled, trained):
        side, step = place(make, step_of)
        torch.manual_seed(1234)
        step.load_state_dict(saved)
        assert_same(_without_about(saved), whole(step), f"{place.__name__}, loaded")
        assert_same(expected[STEPS:], graph_trail(side, step, data[STEPS:]), place.__name__)
        assert_same(end, whole(step), place.__name__)


def _without_about(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "graph.about"}
