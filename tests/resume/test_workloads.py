"""A run that is killed and goes on in a new process ends where the uninterrupted run ends, bit for bit."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.resume.interrupted import SAVED_AT
from tests.resume.workloads import TOTAL, WORKLOADS, plain_run
from tests.support import assert_same
from tests.support.choice import only_quick
from tests.support.warm import run_module


def run_child(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_module("tests.resume.interrupted", *arguments)


@pytest.mark.parametrize("name", only_quick(WORKLOADS, "fp16"))
def test_a_killed_run_goes_on_bitwise(name: str, tmp_path: Path) -> None:
    first = run_child("first", name, tmp_path / "checkpoint")
    assert first.returncode == -signal.SIGKILL, first.stderr
    steps = TOTAL - SAVED_AT
    second = run_child("second", name, tmp_path / "checkpoint", tmp_path / "trail.pt", steps)
    assert second.returncode == 0, second.stderr
    trail = torch.load(tmp_path / "trail.pt", weights_only=False)
    assert_same(plain_run(name)[SAVED_AT:], trail, f"{name}: step after {SAVED_AT}")


def test_the_workloads_are_what_they_say() -> None:
    """Skipped steps before and after the interruption, an epoch that ends after it."""
    scales = [state["scaler"]["scale"] for state in plain_run("fp16")]
    halved = [later < earlier for earlier, later in zip([2.0**10, *scales], scales, strict=False)]
    assert any(halved[:SAVED_AT])
    assert any(halved[SAVED_AT:])
    assert SAVED_AT < 20 // 4 < TOTAL
