"""What is printed of an error that a user makes in a large model."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg

SCRIPT = """\
import torch
from torch import nn
import monograph as mg


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if x.mean() > 0:  # the fault
            x = -x
        return self.fc(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Train(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = Encoder()

    def build(self, x):
        return self.model(x).sum()


Train()(torch.randn(2, 3, 8))
"""


@pytest.mark.long
def test_an_error_in_twelve_layers_takes_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert len(lines) <= 15, done.stderr
    assert str(path) in lines[1]
    fault = 1 + SCRIPT.splitlines().index("        if x.mean() > 0:  # the fault")
    places = [line for line in lines if f'"{path}", line {fault}' in line]
    assert places, done.stderr
    assert any("DataDependentError" in line for line in lines)
    assert any("hint: " in line for line in lines)


@pytest.mark.long
def test_all_of_it_is_there_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    environment = {"MONOGRAPH_FULL_TRACEBACK": "1", "PATH": ""}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    assert len(done.stderr.splitlines()) > 30


def asks_for_a_branch(h: Tensor) -> Tensor:
    return h * float(h.mean().item() > 0)


def asks_for_a_number(h: Tensor) -> Tensor:
    return h / max(h.max().item(), 1.0)


def asks_numpy(h: Tensor) -> Tensor:
    return h * h.detach().numpy().mean()


def asks_for_text(h: Tensor) -> Tensor:
    print(f"{h.mean():.3f}")
    return h


def raises(h: Tensor) -> Tensor:
    raise ValueError("a width of 8")


def has_a_slip(h: Tensor) -> Tensor:
    return h.no_such_method()  # type: ignore[attr-defined,no-any-return]


class Slips(mg.Graph):
    """A graph whose build() has a slip."""

    def __init__(self, slip: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.model, self.slip = nn.Linear(8, 8), slip

    def build(self, x: Tensor) -> Any:
        return self.slip(self, x)


@pytest.mark.parametrize(
    ("slip", "kind", "said"),
    [
        (lambda self, x: self.modle(x), AttributeError, "no attribute 'modle'"),
        (lambda self, x: self.model.wieght * x, AttributeError, "no attribute 'wieght'"),
        (lambda self, x: self.model(x) + targt, NameError, "name 'targt' is not defined"),  # noqa: F821
        (lambda self, x: self.model(x).sum(dimm=0), TypeError, "dimm"),
        (lambda self, x: {}["key"], KeyError, "key"),
    ],
)
def test_a_slip_in_build_is_the_error_of_python_at_its_line(
    slip: Callable[[Any, Tensor], Any], kind: type[Exception], said: str
) -> None:
    graph = Slips(slip)
    for _ in range(2):
        with pytest.raises(kind, match=said) as caught:
            graph(torch.ones(4, 8))
        assert type(caught.value) is kind
        printed = "".join(traceback.format_exception(caught.value))
        assert f'"{__file__}", line {slip.__code__.co_firstlineno}' in printed
        assert "(lambda self, x: " in printed  # the text of the line
        assert "monograph/graph.py" not in printed
        assert len(printed.splitlines()) <= 18


def test_what_torch_refuses_is_shown_with_the_text_of_the_line() -> None:
    def wrong(self: Any, x: Tensor) -> Tensor:
        return self.model(x) @ x  # type: ignore[no-any-return]

    with pytest.raises(mg.CaptureError, match="cannot be multiplied") as caught:
        Slips(wrong)(torch.ones(4, 8))
    place, text = str(caught.value).splitlines()[1:3]
    assert place == f'  at "{__file__}", line {wrong.__code__.co_firstlineno + 1}'
    assert text.startswith("      return self.model(x) @ x")
    assert isinstance(caught.value.cause, RuntimeError)


def multiplies_wrongly(h: Tensor) -> Tensor:
    return h @ torch.ones(3, 3)


def changes_in_place(h: Tensor) -> Tensor:
    gate = torch.sigmoid(h)
    h = gate * 2
    return h * gate.mul_(2)


class Numbered(nn.Module):
    """A layer with a fault, if it is the seventh."""

    def __init__(self, fault: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.fc, self.fault = nn.Linear(8, 8), fault

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        return h if self.fault is None else self.fault(h)


FAULTS = [
    (asks_for_a_branch, mg.DataDependentError, "asked for the value of a tensor"),
    (asks_for_a_number, mg.DataDependentError, "asked for the value of a tensor"),
    (asks_numpy, mg.DataDependentError, "asked for the value of a tensor"),
    (asks_for_text, mg.DataDependentError, "asked for the value of a tensor"),
    (raises, ValueError, "a width of 8"),
    (has_a_slip, AttributeError, "'Tensor' object has no attribute"),
    (multiplies_wrongly, mg.CaptureError, r"cannot be multiplied \(4x8 and 3x3\)"),
    (changes_in_place, mg.CaptureError, "changed in place: by aten.mul_.Tensor"),
]


@pytest.mark.parametrize(("fault", "kind", "said"), FAULTS)
def test_each_mistake_is_told_in_few_lines(
    fault: Callable[[Tensor], Tensor], kind: type[Exception], said: str
) -> None:
    model = nn.Sequential(*(Numbered(fault if number == 7 else None) for number in range(12)))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(kind, match=said) as caught:
        step(torch.ones(4, 8), torch.ones(4, 8))
    error = caught.value
    printed = "".join(traceback.format_exception(error)).splitlines()
    assert len(printed) <= 15, "\n".join(printed)
    lines, start = inspect.getsourcelines(fault)
    own = range(start, start + len(lines))
    if isinstance(error, mg.MonographError):
        assert (error.where.file, error.where.module) == (__file__, "model.7")
        assert error.where.line in own
    else:
        assert any(f'"{__file__}", line {number}' in line for number in own for line in printed)


INTERRUPTED = """\
import os
import signal
import torch
from torch import nn
import monograph as mg


class Step(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))

    def build(self, x):
        if waiting:
            os.kill(os.getpid(), signal.SIGINT)
        loss = self.model(x).sum()
        loss.backward()
        return loss


waiting, step, x = True, Step(), torch.ones(2, 4)
step.config.backend("aten")
try:
    step(x)
except KeyboardInterrupt as error:
    assert type(error) is KeyboardInterrupt
waiting = False
step(x)
assert len(step.builds) == 1
waiting = True
step(torch.ones(2, 4, dtype=torch.float64))
"""


def test_an_interrupt_in_a_capture_is_told_in_few_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    *frames, last = done.stderr.splitlines()
    assert (
        last == "KeyboardInterrupt: interrupted while capturing build 1; Step_0 is unchanged, call it again"
    )
    assert len(frames) <= 12, done.stderr
    assert "os.kill(os.getpid(), signal.SIGINT)" in done.stderr
