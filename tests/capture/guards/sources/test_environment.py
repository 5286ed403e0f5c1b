"""Variables of the environment count by their names: those that a step has asked for."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import monograph as mg

NAME = "MONOGRAPH_TESTS_" + "GAIN"
READERS: dict[str, Callable[[], str]] = {
    "get": lambda: os.environ.get(NAME, ""),
    "getenv": lambda: os.getenv(NAME, ""),
    "index": lambda: "" if NAME not in os.environ else os.environ[NAME] + "",
    "bytes": lambda: os.environb.get(NAME.encode(), b"").decode(),
    "a copy": lambda: dict(os.environ).get(NAME, ""),
    "items": lambda: "".join(value for name, value in os.environ.items() if name == NAME),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("MONOGRAPH_TESTS_TOKEN", "a secret")
    monkeypatch.delenv(NAME, raising=False)
    return monkeypatch


@pytest.mark.parametrize("reader", READERS)
def test_a_variable_that_a_step_asks_for_counts(reader: str, environment: pytest.MonkeyPatch) -> None:
    read = READERS[reader]
    graph = mg.trace(lambda x: x * (1 + len(read())))
    assert graph(torch.ones(2)).tolist() == [1, 1]
    for value in ("a", "ab"):
        environment.setenv(NAME, value)
        assert graph(torch.ones(2)).tolist() == [1 + len(value)] * 2
    environment.delenv(NAME)
    assert graph(torch.ones(2)).tolist() == [1, 1]
    assert f"os.environ['{NAME}'] changed from " in graph.builds[1].reason


@pytest.mark.parametrize("reader", ["get", "getenv", "index", "bytes"])
def test_no_other_counts_or_is_shown(reader: str, environment: pytest.MonkeyPatch) -> None:
    read = READERS[reader]
    graph = mg.trace(lambda x: x * (1 + len(read())))
    graph(torch.ones(2))
    environment.setenv("MONOGRAPH_TESTS_OTHER", "1")
    environment.setenv("MONOGRAPH_TESTS_TOKEN", "another secret")
    graph(torch.ones(2))
    assert len(graph.builds) == 1
    assert "secret" not in graph.explain()
    assert "MONOGRAPH_TESTS_OTHER" not in graph.explain()


def test_which_there_are_counts_for_a_step_that_asks(environment: pytest.MonkeyPatch) -> None:
    graph = mg.trace(lambda x: x * len(os.environ))
    before = graph(torch.ones(1)).item()
    environment.setenv("MONOGRAPH_TESTS_OTHER", "1")
    assert graph(torch.ones(1)).item() == before + 1


def test_a_variable_that_steps_count_with(environment: pytest.MonkeyPatch) -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        number = int(os.environ.get(NAME, "0")) + 1
        os.environ[NAME] = str(number)
        return x * number

    graph = mg.trace(counted)
    assert [graph(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert os.environ[NAME] == "4"
    assert os.popen(f"echo ${NAME}").read() == "4\n"
