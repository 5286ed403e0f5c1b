"""A step whose code prints does so when it is captured alone: the log says so, with the line."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

import monograph as mg
from tests.support.steps import line_of


def said(caplog: pytest.LogCaptureFixture, build: Callable[..., torch.Tensor]) -> list[str]:
    graph = mg.trace(build)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graph(torch.ones(2))
    return [record.getMessage() for record in caplog.records if "build() prints" in record.getMessage()]


def printing(x: torch.Tensor) -> torch.Tensor:
    print("in build")  # at: printing
    return x * 2


def in_a_helper(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
    return printing(x)


@pytest.mark.parametrize("build", [printing, in_a_helper])
def test_the_line_is_said_once(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    build: Callable[..., torch.Tensor],
) -> None:
    (line,) = said(caplog, build)
    assert f"build() prints (test_prints.py:{line_of('printing', __file__)})" in line
    assert "return the value and print it after the call" in line
    assert capsys.readouterr().out == "in build\n"


def now_and_then(x: torch.Tensor) -> torch.Tensor:
    if x.dim() > 4:
        print("many")
    return x * 2


def after_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(x.dim() - 1):
        print("inner")
    return x * 2


def in_another_function(x: torch.Tensor) -> torch.Tensor:
    def never() -> None:
        print("never")

    return x * 2


@pytest.mark.parametrize("build", [now_and_then, after_a_loop, in_another_function])
def test_nothing_is_said_of_what_may_not_print(
    caplog: pytest.LogCaptureFixture, build: Callable[..., torch.Tensor]
) -> None:
    assert said(caplog, build) == []


def of_a_tensor(x: torch.Tensor) -> torch.Tensor:
    print(x)
    return x * 2


def test_a_tensor_that_is_printed_is_said_to_have_no_values(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, of_a_tensor) == []
    assert "the text of a tensor" in caplog.text
