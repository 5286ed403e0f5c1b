"""@profile: what it times, counts and reports. No test looks at how long anything takes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch as real_torch
from rich.console import Console

from monograph.testing.dual import profile, torch
from monograph.testing.timing import ProfileResult, Timing, table


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOGRAPH_PROFILE_WARMUP", "1")
    monkeypatch.setenv("MONOGRAPH_PROFILE_RUNS", "4")


def relu(**options: Any) -> list[ProfileResult]:
    @profile(torch.nn.functional.relu, **options)
    def run() -> None:
        x = torch.nn.functional.relu(torch.ones(1, 2, 3), profile_description="small")
        torch.nn.functional.relu(torch.exp(x))

    return run()


def test_each_call_is_timed_forward_and_with_backward() -> None:
    results = relu(show=False)
    assert [(result.name, result.description, result.backward) for result in results] == [
        ("relu", "small", False),
        ("relu", "small", True),
        ("relu", "", False),
        ("relu", "", True),
    ]
    assert {result.arguments for result in results} == {"float32[1, 2, 3]"}
    assert {result.threads for result in results} == {real_torch.get_num_threads()}


def test_both_modes_ran_as_often_as_was_asked() -> None:
    for result in relu(show=False):
        assert len(result.eager.seconds) == len(result.graph.seconds) == 4
        assert all(seconds > 0 for seconds in (*result.eager.seconds, *result.graph.seconds))
        assert result.speedup == result.eager.median / result.graph.median


def test_only_the_operator_that_was_asked_for_is_timed() -> None:
    @profile(real_torch.exp, show=False)
    def run() -> None:
        torch.exp(torch.ones(2))
        torch.sin(torch.ones(2))
        torch.nn.functional.relu(torch.ones(2), profile_description="is nothing to relu")

    assert [result.name for result in run()] == ["exp", "exp"]


def test_without_floating_point_arguments_there_is_no_backward() -> None:
    @profile(torch.add, show=False)
    def run() -> None:
        torch.add(torch.arange(3), 1)

    (result,) = run()
    assert not result.backward
    assert result.arguments == "int64[3], 1"


def test_the_decorated_function_goes_on_with_real_results() -> None:
    seen = []

    @profile(torch.mul, show=False)
    def run(factor: int) -> None:
        seen.append(torch.mul(torch.ones(2), factor).tolist())

    run(3)
    assert seen == [[3.0, 3.0]]


def test_a_hook_receives_the_results() -> None:
    received: list[list[ProfileResult]] = []
    results = relu(show=False, hook=received.append)
    assert received == [results]


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    relu()
    said = capsys.readouterr().out
    assert "relu: small" in said
    assert "forward + backward" in said
    timing = Timing("eager", (1e-6, 2e-6, 3e-6))
    result = ProfileResult("f", "", "float32[2]", False, 1, timing, Timing("graph", (1e-6,)))
    console = Console(file=io.StringIO(), width=140)
    console.print(table([result]))
    text = console.file.getvalue()
    assert "2.0 ± 2.0 µs" in text
    assert "1.0 ± 0.0 µs" in text
    assert "2.00" in text


def test_a_senseless_number_of_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOGRAPH_PROFILE_RUNS", "0")
    with pytest.raises(ValueError, match="MONOGRAPH_PROFILE_RUNS is 0"):
        relu(show=False)


def test_nothing_is_timed_after_the_function() -> None:
    results = relu(show=False)
    count = len(results)
    torch.nn.functional.relu(torch.ones(2))
    assert len(results) == count
