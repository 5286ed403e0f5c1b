"""Lists in globals, under names that attributes of torch and of libraries have too."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

log: dict[str, list[float]] = {"d": []}
data: list[float] = []
state: list[float] = []
args: list[int] = []


def empty() -> None:
    log["d"].clear()
    data.clear()
    state.clear()
    args.clear()


def of(loss_fn: Callable[..., Any]) -> Any:
    empty()
    model = nn.Linear(4, 1)
    return mg.train_graph(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))


def adds(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = (p - y).square().mean()
    log["d"].append(loss.item())
    data.append(loss.item())
    state.append(loss.item())
    args.append(1)
    return loss * math.log(2) + torch.log(loss.detach() + 1)


def test_a_name_that_libraries_use_is_no_read() -> None:
    step = of(adds)
    losses = [step(torch.ones(2, 4), torch.zeros(2, 1)).item() for _ in range(3)]
    assert len(step.builds) == 1
    assert data == state == log["d"]
    assert len(set(data)) == len(losses) == len(args) == 3


def by_the_module(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    data.append((p - y).mean().item())
    return (p - y).square().mean() * len(sys.modules[__name__].data)  # type: ignore[attr-defined]


HERE: Any = sys.modules[__name__]


def by_a_name_of_the_module(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    data.append((p - y).mean().item())
    return (p - y).square().mean() * len(HERE.data)


def by_a_library(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    data.append((p - y).mean().item())
    return (p - y).square().mean() * len(operator.attrgetter("data")(HERE))


def by_another_function(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    data.append((p - y).mean().item())
    return (p - y).square().mean() * many()


def many() -> int:
    return len(data)


def by_globals(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    data.append((p - y).mean().item())
    return (p - y).square().mean() * len(globals()["data"])


def by_an_import(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from tests.capture.effects import test_global_lists as here

    data.append((p - y).mean().item())
    return (p - y).square().mean() * len(here.data)


@pytest.mark.parametrize(
    "loss_fn",
    [by_the_module, by_a_name_of_the_module, by_a_library, by_another_function, by_globals, by_an_import],
    ids=lambda item: item.__name__,
)
def test_a_list_that_is_read_after_all_is_refused(loss_fn: Callable[..., Any]) -> None:
    step = of(loss_fn)
    with pytest.raises(mg.CaptureError, match=r"data\[0\], in a way that no replay can repeat"):
        step(torch.ones(2, 4), torch.zeros(2, 1))
