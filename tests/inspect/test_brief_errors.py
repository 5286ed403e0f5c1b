"""What is printed of an error that a user makes in a large model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_all_of_it_is_there_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    environment = {"MONOGRAPH_FULL_TRACEBACK": "1", "PATH": ""}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    assert len(done.stderr.splitlines()) > 30
