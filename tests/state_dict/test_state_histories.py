"""Histories in attributes: what a step and the script put into them, in the state of a graph."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg


class Step(mg.Graph):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)
        self.history: dict[str, Any] = {"loss": [], "test": {"accuracy": []}, **more}
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), 0.01))

    def build(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        loss.backward()
        self.history["loss"].append(loss.item())


@pytest.fixture
def trained() -> Step:
    step = Step()
    step(torch.ones(2, 4))
    return step


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), 0.5])
def test_numbers_of_numpy_are_saved_as_those_of_python(trained: Step, number: Any, tmp_path: Path) -> None:
    trained.history["test"]["accuracy"].append(number)
    mg.save(trained.state_dict(), tmp_path / "state")
    other = Step()
    other.load_state_dict(mg.load(tmp_path / "state"))
    assert other.history == trained.history
    assert type(other.history["test"]["accuracy"][0]) in (bool, int, float)


@pytest.mark.parametrize("item", [datetime.date(2020, 1, 1), np.zeros(2), {1}])
def test_what_keeps_a_history_from_being_saved_is_named(trained: Step, item: Any) -> None:
    trained.history["test"]["accuracy"] += [0.5, item]
    with pytest.warns(UserWarning, match="for which the state has no place") as caught:
        trained.state_dict()
    (said,) = [str(warning.message) for warning in caught]
    assert (
        f"graph.history['test']['accuracy'][1] is a {type(item).__name__}, with which none of graph.history is saved"
        in said
    )


def test_entries_that_the_saved_dict_lacks_are_missing(trained: Step) -> None:
    state = trained.state_dict()
    other = Step(more=[1], test={"accuracy": [], "loss": []})
    with pytest.raises(
        mg.CheckpointError, match=r"missing: .*history\['more'\], .*history\['test'\]\['loss'\]"
    ):
        other.load_state_dict(state)
    assert other.history == {"loss": [], "test": {"accuracy": [], "loss": []}, "more": [1]}
    left_out = other.load_state_dict(state, strict=False)
    assert len(left_out.missing_keys) == 2
    assert other.history == {**trained.history, "test": {"accuracy": [], "loss": []}, "more": [1]}


def test_going_back_takes_away_what_came_since(trained: Step, tmp_path: Path) -> None:
    mg.save(trained.state_dict(), tmp_path / "state")
    trained.history["late"] = [3]
    trained(torch.ones(2, 4))
    trained.load_state_dict(mg.load(tmp_path / "state"))
    assert list(trained.history) == ["loss", "test"]
    assert len(trained.history["loss"]) == 1
