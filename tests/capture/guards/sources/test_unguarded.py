"""Looks at files and processes are constants of a build: the log says so, with the line."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from collections.abc import Callable
from os.path import isfile
from pathlib import Path

import pytest
import torch

import monograph as mg

STOP = Path("no such file")

LOOKS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "os.path.exists": ("a file", lambda x: x * (2 if os.path.exists("stop") else 1)),
    "a function of os.path": ("a file", lambda x: x * (2 if isfile("stop") else 1)),
    "a path": ("a file", lambda x: x * (2 if STOP.exists() else 1)),
    "glob": ("a file", lambda x: x * len(glob.glob("no such file"))),
    "a frame": ("the frames of callers", lambda x: x * len(sys._getframe().f_code.co_name)),
    "a process": ("another process", lambda x: x * subprocess.call(["true"])),
}


@pytest.mark.parametrize(("what", "look"), LOOKS.values(), ids=LOOKS)
def test_a_look_is_told(
    what: str, look: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    mg.trace(look)(torch.ones(1))
    assert f"build() asks for {what} ({Path(__file__).name}:" in caplog.text


def test_names_of_files_are_no_looks(caplog: pytest.LogCaptureFixture) -> None:
    mg.trace(lambda x: x * len(os.path.join("a", STOP.name)))(torch.ones(1))
    assert "asks for" not in caplog.text
