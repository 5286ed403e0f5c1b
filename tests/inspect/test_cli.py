"""monograph show, verify, profile, replay: the commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import torch
from torch import nn
import monograph as mg


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.body(x)
        return self.head(torch.log(h))  # the fault: h may be negative


class Train(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


SCALE = [1.0]


class Moving(Train):
    def build(self, x, y):
        SCALE[0] *= 0.5
        loss = nn.functional.cross_entropy(self.model.head(x) * SCALE[0], y)
        loss.backward()
        return loss


def batches():
    torch.manual_seed(0)
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(3)]


def make():
    torch.manual_seed(0)
    return Train(), batches()


def make_moving():
    torch.manual_seed(0)
    return Moving(), batches()


def make_nothing():
    return Model(), batches()


if __name__ == "__main__":
    graph, data = make()
    for x, y in data:
        print(graph(x, y))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def monograph(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from monograph.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=given)


def test_from_a_nan_to_its_line_in_one_command(script: Path) -> None:
    done = monograph("verify", f"{script}:make")
    assert done.returncode == 1
    line = 1 + SCRIPT.splitlines().index(
        "        return self.head(torch.log(h))  # the fault: h may be negative"
    )
    assert "the first NaN is made by aten.log.default" in done.stdout
    assert f'train.py", line {line}' in done.stdout
    assert "in model (forward)" in done.stdout


def test_from_a_constant_that_moves_to_its_line_in_one_command(script: Path, tmp_path: Path) -> None:
    done = monograph("verify", f"{script}:make_moving", "--repro", str(tmp_path / "difference.py"))
    assert done.returncode == 1
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "* SCALE[0]" in text)
    assert "a constant that moves" in done.stdout
    assert f"train.py:{line}" in done.stdout
    assert (tmp_path / "difference.py").exists()


def test_the_program_is_printed(script: Path) -> None:
    done = monograph("show", f"{script}:make")
    assert done.returncode == 0
    assert "def train_step(" in done.stdout
    assert "aten.log.default" in done.stdout
    assert "first call" in monograph("show", f"{script}:make", "--explain").stdout


def test_a_session(script: Path) -> None:
    done = monograph("replay", f"{script}:make", given="to model.head\nvalue model.body\nnonfinite\nquit\n")
    assert done.returncode == 0, done.stderr
    assert "f32[6, 8]" in done.stdout
    assert "the first NaN" in done.stdout


def test_times_and_a_trace(script: Path, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    done = monograph("profile", f"{script}:make", "--trace", str(trace), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "of the roofline" in done.stdout
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "model", "model.head"} <= names
    assert "model.head" in page.read_text()


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nowhere.py:make", "no file"),
        ("{script}:nothing", "no function nothing"),
        ("{script}:make_nothing", "has to be a Graph"),
    ],
)
def test_a_mistake_is_answered(factory: str, said: str, script: Path) -> None:
    done = monograph("verify", factory.format(script=script))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
