"""monograph show, verify, memory, profile, replay: the commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from monograph.cli.main import app

SCRIPT = """\
from pathlib import Path

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


SCALE = Path(__file__).with_name("scale.txt")
SCALE.write_text("1.0")


class Moving(Train):
    def build(self, x, y):
        SCALE.write_text(str(float(SCALE.read_text()) * 0.5))
        loss = nn.functional.cross_entropy(self.model.head(x) * float(SCALE.read_text()), y)
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


def make_late():
    torch.manual_seed(0)
    data = [(x.abs(), y) for x, y in batches()]
    graph = Train()
    with torch.no_grad():
        for parameter in graph.model.body.parameters():
            parameter.abs_().add_(1)
    data[2][0][1, 3] = float("nan")
    return graph, data


def make_raising():
    return Train(), ({}["batch"] for _ in range(3))


def make_one():
    return Train()


def make_planned():
    with torch.device("meta"):
        graph = Train()
    return graph, [(mg.spec((6, 8), device="meta"), mg.spec((6,), torch.int64, "meta"))]


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
    """As a user runs it, without the time that a new process takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        done = CliRunner().invoke(app, arguments, input=given)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def test_from_a_nan_to_its_line_in_one_command(script: Path) -> None:
    done = monograph("verify", f"{script}:make")
    assert done.returncode == 1
    line = 1 + SCRIPT.splitlines().index(
        "        return self.head(torch.log(h))  # the fault: h may be negative"
    )
    assert "the first NaN is made by aten.log.default" in done.stdout
    assert f'train.py", line {line}' in done.stdout
    assert "in model (forward)" in done.stdout


def test_from_a_nan_in_a_later_step_to_its_line_in_two_commands(script: Path) -> None:
    done = monograph("verify", f"{script}:make_late")
    assert done.returncode == 1
    assert "as promised" in done.stdout
    assert "step 2 of the graph, counted from 0, made a NaN" in done.stdout
    assert "came in with x" in done.stdout
    done = monograph("replay", "--after", "2", f"{script}:make_late", given="value x\nnonfinite\n")
    assert "1 NaN" in done.stdout
    assert "the NaN is not of this step: it came in with x" in done.stdout


def test_a_command_says_nothing_of_its_own_builds(script: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert monograph("verify", f"{script}:make_late").returncode == 1
    assert "the configuration changed" not in caplog.text


def test_from_a_constant_that_moves_to_its_line_in_one_command(script: Path, tmp_path: Path) -> None:
    done = monograph("verify", f"{script}:make_moving", "--repro", str(tmp_path / "difference.py"))
    assert done.returncode == 1
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "* float(SCALE" in text)
    assert "a constant that moves" in done.stdout
    assert f"train.py:{line}" in done.stdout
    assert (tmp_path / "difference.py").exists()


def test_the_program_is_printed(script: Path) -> None:
    done = monograph("show", f"{script}:make")
    assert done.returncode == 0
    assert "def train_step(" in done.stdout
    assert "aten.log.default" in done.stdout
    assert "first call" in monograph("show", f"{script}:make", "--explain").stdout
    assert "def model(" in monograph("show", f"{script}:make", "--module", "model").stdout


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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nowhere.py:make", "no file"),
        ("{script}:nothing", "no function nothing"),
        ("{script}:make_nothing", "has to return a Graph and its batches"),
        ("{script}:make_one", "has to return a Graph and its batches"),
    ],
)
def test_a_mistake_is_answered(factory: str, said: str, script: Path) -> None:
    done = monograph("verify", factory.format(script=script))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_error_of_their_own_is_shown_with_their_own_lines(script: Path) -> None:
    command = [sys.executable, "-m", "monograph", "verify", f"{script}:make_raising"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 6, done.stderr
    assert f'"{script}", line' in done.stderr
    assert "KeyError: 'batch'" in done.stderr


def test_a_folder_that_is_not_there_is_told_before_anything_is_timed(script: Path, tmp_path: Path) -> None:
    done = monograph("profile", f"{script}:make", "--html", str(tmp_path / "nowhere" / "page.html"))
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@pytest.mark.parametrize("factory", ["make", "make_planned"])
def test_what_a_step_will_hold(script: Path, tmp_path: Path, factory: str) -> None:
    picture, numbers = tmp_path / "memory.svg", tmp_path / "memory.json"
    done = monograph("memory", f"{script}:{factory}", "--plot", str(picture), "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    assert "held at the peak" in done.stdout
    assert "model.body" in done.stdout
    found = json.loads(numbers.read_text())
    assert found["total_bytes"] == sum(item["nbytes"] for item in found["holders"])
    assert picture.read_text().startswith("<svg")


def test_where_a_picture_cannot_be_is_said_before_the_work(script: Path, tmp_path: Path) -> None:
    done = monograph("memory", f"{script}:make", "--plot", str(tmp_path / "nowhere" / "memory.svg"))
    assert (done.returncode, "there is no folder" in done.stderr) == (2, True)
    done = monograph("memory", f"{script}:make", "--plot", str(tmp_path / "memory.pdf"))
    assert (done.returncode, "SVG or PNG" in done.stderr) == (2, True)
