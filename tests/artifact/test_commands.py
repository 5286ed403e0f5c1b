"""`monograph export`, `inspect` and `run`, each in a process as a user starts it."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
import typer

import monograph as mg
from monograph.cli.artifacts import read_array
from tests.artifact.test_malicious import Payload
from tests.support.warm import run_script

SCRIPT = """
import torch
import monograph as mg


class Infer(mg.Graph):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)

    def build(self, x, scale=2):
        return {"scores": self.model(x) * scale}


def make():
    return Infer(), iter([(torch.ones(3, 4),)])
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "model.py").write_text(SCRIPT)

    def command(*arguments, code=0):
        done = run_script(["-m", "monograph", *map(str, arguments)], cwd=tmp_path, env=dict(os.environ))
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return command


def test_from_a_factory_to_results(run, tmp_path):
    assert "holds artifact of monograph" in run("export", "model.py:make", "out.zip")
    told = run("inspect", "out.zip")
    assert "infer(x: float32[3, 4]) -> {scores: float32[3, 2]}  [auto]" in told
    assert "state/infer/model/weight" in told
    assert "more: --all" not in told
    found = json.loads(run("inspect", "out.zip", "--json"))
    assert found["ops"]["aten::addmm.default"] == 1
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    run("run", "out.zip", "--input", "x=x.npy", "--output", "results.npz")
    expected = mg.load(tmp_path / "out.zip")(torch.arange(12.0).view(3, 4))["scores"]
    assert np.array_equal(np.load(tmp_path / "results.npz")["result.scores"], expected.numpy())
    assert "median of 2; the first one, which makes the program runnable, " in run(
        "run", "out.zip", "--repeat", 2
    )


def test_files_with_code_are_refused(tmp_path, capsys):
    marker = tmp_path / "code ran"
    np.save(tmp_path / "code.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(typer.Exit):
        read_array(tmp_path / "code.npy")
    assert "cannot be read" in "".join(capsys.readouterr())
    assert not marker.exists()


@pytest.mark.long
def test_mistakes(run, tmp_path):
    mg.save({"a": torch.ones(2)}, tmp_path / "checkpoint")
    assert "checkpoint of monograph" in run("inspect", "checkpoint")
    assert "there is nothing to run" in run("run", "checkpoint", code=2)
    assert "No such file" in run("inspect", "nothing", code=2)
    run("export", "model.py:make", "out.zip")
    assert "exists already" in run("export", "model.py:make", "out.zip", code=2)
    assert "There is no argument y" in run("run", "out.zip", "--input", "y=x.npy", code=2)
    assert "cannot be read" in run("run", "out.zip", "--input", "x=x.npy", code=2)
    marker = tmp_path / "code ran"
    np.save(tmp_path / "code.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    assert "cannot be read" in run("run", "out.zip", "--input", "x=code.npy", code=2)
    assert not marker.exists()
    assert "Choose a signature" in run("run", "out.zip", "--signature", "train", code=2)
