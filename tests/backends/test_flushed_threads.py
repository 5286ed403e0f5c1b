"""The mode of `torch.set_flush_denormal` is that of one thread: what others compute on `exact` has eager's bits all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import monograph as mg
from monograph.elementwise.proof import special_values
from tests.backends.test_chains import Step, chained_ops, drawn, same, trained
from tests.backends.test_exact import Make


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, of which this one flushes denormal numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.empty(100_000).add_(1)  # the other one begins without the mode
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def arithmetic(x: Tensor) -> Tensor:
    """A chain."""
    return (x * x.abs() + x) * 0.5 - x


@pytest.mark.parametrize("size", [20_000, 32_768, 200_000])
def test_chains(size: int) -> None:
    graph = mg.trace(arithmetic)
    graph.config.backend("exact")
    for x in drawn((size,), (size,)):
        tiny = x * 1e-38
        assert same(graph(tiny), arithmetic(tiny))
    notes = " ".join(graph.builds[-1].notes)
    assert ("chain" in notes) == (size <= 32_768)


class Layers(nn.Module):
    """Many parameters with tiny numbers."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.given = nn.ParameterList([torch.randn(width) * 1e-37 for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for item in self.given:
            made = made + item * x
        return made


def added(parameters: Iterable[Tensor]) -> Optimizer:
    """New weights are differences of tiny numbers."""
    return torch.optim.SGD(parameters, lr=1e-37)


def rooted(parameters: Iterable[Tensor]) -> Optimizer:
    """The same with a root, which another function than a loop computes."""
    return torch.optim.RMSprop(parameters, lr=1e-37)


@pytest.mark.parametrize("make", [added, rooted])
@pytest.mark.parametrize(("width", "count"), [(900, 30), (5000, 8), (40_000, 3)])
def test_updates(width: int, count: int, make: Make) -> None:
    torch.manual_seed(0)
    model = Layers(width, count)
    plain = copy.deepcopy(model)
    optimizer, graph = make(plain.parameters()), Step(model, make)
    graph.config.backend("exact")
    for x in drawn((2, width), (2, width), (2, width)):
        optimizer.zero_grad()
        expected = trained(plain, x)
        optimizer.step()
        assert all(map(same, expected, graph(x)))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert same(one.detach(), other.detach())
    if width < 1000:
        assert chained_ops(graph) > 3


def test_denormal_numbers_are_tried_again_once_they_count() -> None:
    few = special_values(torch.float32, 1)
    torch.set_flush_denormal(False)
    many = special_values(torch.float32, 1)
    tiny = torch.finfo(torch.float32).tiny

    def denormals(values: Tensor) -> int:
        return int(((values.abs() < tiny) & (values != 0)).sum())

    assert denormals(many) > denormals(few)
