"""A state that changes while it is saved is refused: what is written would be part old and part new."""

from __future__ import annotations

import os

import pytest
import torch

import monograph as mg
from monograph.checkpoint import write as writing


@pytest.fixture
def meanwhile(monkeypatch):
    """Calls a function in the middle of a save."""
    plain = writing.write_tensors

    def put(function):
        def run(*args):
            written = plain(*args)
            function()
            return written

        monkeypatch.setattr(writing, "write_tensors", run)

    return put


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_in_another_thread_is_an_error_that_says_so(tmp_path, meanwhile, overwrite):
    state = {"weight": torch.ones(3), "other": torch.ones(3)}
    if overwrite:
        mg.save({"weight": torch.zeros(3)}, tmp_path / "c")
    meanwhile(lambda: state["other"].add_(1))
    with pytest.raises(
        mg.CheckpointError, match="other was changed while it was saved: a step ran in another thread"
    ) as e:
        mg.save(state, tmp_path / "c", overwrite=overwrite)
    assert "between two steps" in e.value.hint
    if overwrite:
        assert list(mg.load(tmp_path / "c")) == ["weight"]
        assert len(os.listdir(tmp_path / "c")) == 2
    else:
        assert os.listdir(tmp_path) == []


def test_a_parameter_is_known_by_any_view_of_it(tmp_path, meanwhile):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    meanwhile(optimizer.step)
    with pytest.raises(mg.CheckpointError, match=r"was changed while it was saved"):
        mg.save(layer.state_dict(), tmp_path / "c")


def test_steps_beside_a_save_in_the_background_change_nothing_of_it(tmp_path, meanwhile):
    weight = torch.ones(3)
    meanwhile(lambda: weight.add_(1))
    with mg.CheckpointManager(tmp_path, asynchronous=True) as manager:
        path = manager.save({"weight": weight}, step=1)
    assert mg.load(path)["weight"].tolist() == [1, 1, 1]


def test_tensors_of_inference_mode_are_saved(tmp_path):
    with torch.inference_mode():
        made = torch.ones(2)
    assert mg.load(mg.save({"made": made}, tmp_path / "c"))["made"].sum() == 2
