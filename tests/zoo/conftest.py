"""No network, and tables of what was trained at the end of the run."""

from __future__ import annotations

import os
import socket
from typing import Any

# read by the libraries when they are imported, which is after this file
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DIFFUSERS_OFFLINE": "1"}
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest

# some libraries import torchvision where it is installed
import tests.support.torchvision_ops  # noqa: F401

SIZED_COLUMNS = ("model", "what varies", "sizes", "builds", "cause of more than two")
COLUMNS = ("model", "library", "nodes", "builds", "seconds", "result")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks for a download fails, also where a network is at hand."""

    def refuse(_socket: socket.socket, address: Any) -> None:
        raise AssertionError(f"a model of the zoo wants to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each model, as the rows of a Markdown table."""
    rows = []
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        told = dict(report.user_properties)
        if report.when == "call" and "model" in told:
            told |= {"seconds": f"{report.duration:.1f}"}
            told.setdefault("result", "FAILED") if report.passed else told.update(result="FAILED")
            rows.append([str(told.get(column, "")) for column in COLUMNS])
    if rows:
        terminalreporter.section("the zoo")
        for row in [COLUMNS, ["---"] * len(COLUMNS), *sorted(rows, key=lambda row: (row[1], row[0]))]:
            terminalreporter.write_line(f"| {' | '.join(row)} |")
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [dict(report.user_properties) for report in reports if report.when == "call"]
    if sized := [told["sized"] for told in properties if "sized" in told]:
        terminalreporter.section("the zoo at five sizes")
        for row in [SIZED_COLUMNS, ["---"] * len(SIZED_COLUMNS), *sized]:
            terminalreporter.write_line(f"| {' | '.join(row)} |")
