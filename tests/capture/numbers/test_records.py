"""Tuples, lists and dicts of what a step computes, put into attributes and added to lists: as in eager mode, by one build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monograph as mg
from tests.support import assert_same

Build = Callable[[Any, Tensor], Any]


def a_tuple_of_numbers(self: Any, x: Tensor) -> Any:
    self.last = (x.sum().item(), x.mean().item())
    return x * 2


def a_dict_of_numbers(self: Any, x: Tensor) -> Any:
    self.last = {"sum": x.sum().item(), "where": [x.argmax().item(), "x"]}
    return x * 2


def a_tuple_of_both(self: Any, x: Tensor) -> Any:
    self.last = (x.sum().item(), x * 3, None)
    return x * 2


def tensors_for_a_list(self: Any, x: Tensor) -> Any:
    y = x * 2
    self.log.append((y.sum(), y.mean().detach()))
    return y


def both_for_a_list(self: Any, x: Tensor) -> Any:
    y = x * 2
    self.log.append({"y": y.sum(), "mean": y.mean().item(), "more": [x.max() + 1]})
    self.last = (y.max().item(),)
    return y


BUILDS = [a_tuple_of_numbers, a_dict_of_numbers, a_tuple_of_both, tensors_for_a_list, both_for_a_list]


def sides(build: Build, backend: str = "aten") -> tuple[Any, Any]:
    """A graph, and an object with the same function in eager mode."""
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    graph.config.backend(backend)
    for side in (graph, plain):
        side.last, side.log = None, []
    return graph, plain


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator) for _ in range(count)]


def compared(graph: Any, plain: Any, xs: list[Tensor]) -> None:
    for x in xs:
        assert_same(plain.build(x), graph(x))
        assert type(plain.last) is type(graph.last)
        assert_same(plain.last, graph.last)
        assert_same(plain.log, graph.log)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_each_step_puts_its_own(build: Build) -> None:
    graph, plain = sides(build)
    compared(graph, plain, batches(5))
    assert len(graph.builds) == 1
    graph.last = plain.last = "another"  # somebody sets it between two steps
    compared(graph, plain, batches(2))
    assert len(graph.builds) == 1


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_verify_and_many(build: Build) -> None:
    graph, plain = sides(build)
    xs = batches(4)
    compared(graph, plain, xs[:1])
    report = graph.verify(xs[1])
    assert report.ok, str(report)
    assert_same((plain.last, plain.log), (graph.last, graph.log))
    graph.many(torch.stack(xs[1:]))
    for x in xs[1:]:
        plain.build(x)
    assert_same((plain.last, plain.log), (graph.last, graph.log))


def test_a_list_at_two_places_is_no_record() -> None:
    def shared(self: Any, x: Tensor) -> Any:
        row = [x.sum().item()]
        self.last = row
        self.log.append(row)
        return x

    graph, _ = sides(shared)
    with pytest.raises(mg.CaptureError, match="no replay can repeat"):
        graph(torch.ones(2))


def test_what_the_next_step_reads_is_no_record() -> None:
    def read(self: Any, x: Tensor) -> Any:
        self.last = (x.sum().item(), 0.0 if self.last is None else self.last[0])
        return x

    graph, _ = sides(read)
    with pytest.raises(mg.CaptureError, match=r"graph\.last"):
        graph(torch.ones(2))
    assert graph.last is None


@pytest.mark.long
@pytest.mark.parametrize("build", [a_tuple_of_both, both_for_a_list], ids=lambda build: build.__name__)
def test_compiled(build: Build) -> None:
    graph, plain = sides(build, "inductor")
    for x in batches(3):
        graph(x)
        plain.build(x)
    torch.testing.assert_close((plain.last or ())[:1], (graph.last or ())[:1])
    assert len(plain.log) == len(graph.log)
    assert len(graph.builds) == 1
