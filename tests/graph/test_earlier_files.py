"""Files that version 0.1 wrote before its modules got other names: they load, and go on with the same bits."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import monograph as mg
from monograph.renamed import RENAMED, RENAMED_CLASSES
from tests.support import earlier
from tests.support.earlier import Step
from tests.support.goldens import GOLDENS

FILES = GOLDENS / "earlier"
LOSSES = json.loads((FILES / "losses.json").read_text())


def goes_on(run: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """The next losses, which are nearly those that the writer of the files had: it may have had another processor."""
    x = torch.arange(12.0).view(4, 3) / 12
    losses = [run(x).item() for _ in LOSSES]
    assert losses == pytest.approx(LOSSES, rel=0.05)
    return losses


def loaded() -> tuple[Step, Step]:
    """Two graphs in the state of the checkpoint."""
    steps = Step(), Step()
    for step in steps:
        step.load_state_dict(mg.load(FILES / "checkpoint.zip"))
    return steps


def test_a_pickled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests.earlier", earlier)  # where its class was when it was pickled
    for name in RENAMED:
        monkeypatch.delitem(sys.modules, name, raising=False)  # each is imported, and warns, once
    raw = (FILES / "graph.pickle").read_bytes()
    with pytest.warns(DeprecationWarning, match="is monograph.state.find now"):
        step = pickle.loads(raw)
    assert step.config.settings == replace(Step().config.settings, backend="aten")  # the default of then
    state = mg.load(FILES / "checkpoint.zip")  # of the same moment
    assert all(map(torch.equal, step.model.state_dict().values(), state["model"].values()))
    eager, random = pickle.loads(raw), loaded()[0].state_dict()
    step.load_state_dict(random)
    losses = goes_on(step)
    eager.load_state_dict(random)
    assert losses == goes_on(eager.eager)


@pytest.mark.parametrize(("module", "name"), RENAMED_CLASSES)
def test_a_pickled_class(module: str, name: str) -> None:
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert f"{found.__module__}.{found.__name__}" == RENAMED_CLASSES[module, name]


def test_a_checkpoint() -> None:
    step, eager = loaded()
    losses = goes_on(step)
    eager.load_state_dict(mg.load(FILES / "checkpoint.zip"))  # random numbers as well
    assert losses == goes_on(eager.eager)


def test_an_artifact() -> None:
    step, _ = loaded()
    losses = goes_on(step)
    assert losses == goes_on(mg.load(FILES / "artifact.zip"))


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(RENAMED))
def test_modules_by_their_earlier_names(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = __import__(name, fromlist=["x"])
    assert copy.copy(module.__name__) == name
    with pytest.raises(AttributeError):
        _ = module.there_is_no_such_class
