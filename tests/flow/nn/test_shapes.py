"""Inputs of many shapes, dtypes and kinds over one set of weights, and what stands in for OneFlow's offline compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import CaptureError, DefinitionError
from tests.flow.steps import TrainStep, batches, check_told, graph, net, plain, sgd, trained, weights
from tests.support import assert_same


def test_shapes_share_weights_and_the_optimizers_state() -> None:
    reference, model = net(), net()
    data = [torch.randn(rows, 3) for rows in (4, 2, 4, 7, 2)]
    step = TrainStep(model, sgd(model, momentum=0.9))
    expected = plain(reference, sgd(reference, momentum=0.9), data)
    assert_same(expected, trained(step, data))
    assert_same(weights(reference), weights(model))
    assert len(step.builds) == 2  # the second one is for any number of rows


def test_each_build_says_why_it_was_made() -> None:
    step = graph(lambda self, x: self.model(x), model=net())
    for rows in (4, 2):
        step(torch.randn(rows, 3))
    assert step.builds[0].reason == "first call"
    assert "argument x is a tensor (2, 3)" in step.builds[1].reason


def test_the_decorator_of_oneflow() -> None:
    class Shaped(nn.Graph):
        @nn.Graph.with_dynamic_input_shape(size=2, enable_shared=True)
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def build(self, x):
            return self.model(x)

    model = net()
    step = Shaped(model)
    for rows in (1, 2, 3, 4, 1):  # more than `size`, and none is thrown away
        x = torch.randn(rows, 3)
        assert_same(model(x).detach(), step(x).detach())
    assert len(step.builds) == 2  # for one row, and for any other number


def test_a_branch_on_a_shape() -> None:
    step = graph(lambda self, x: x.flip(0) * 2 if len(x) > 2 else x + 1)
    assert step(torch.arange(2.0)).tolist() == [1.0, 2.0]
    assert step(torch.arange(3.0)).tolist() == [4.0, 2.0, 0.0]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),)),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.int32),)),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2))),
        ((torch.ones(2), 2), (torch.ones(2), 3)),
        (([torch.ones(2)],), (torch.ones(2),)),
        ((torch.ones(2, 2),), (torch.ones(2, 2).t()[::1],)),
    ],
    ids=["dtype", "integers", "None", "a number", "a list", "strides"],
)
def test_what_differs_is_not_taken_for_the_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Shapes alone do not say which build fits."""

    def build(self, x, other=None):
        x = x[0] * 10 if isinstance(x, list) else x
        return x / 3 if other is None else x * other

    step, reference = graph(build), lambda *args: build(None, *args)
    for args in (first, second, first):
        assert_same(reference(*args), step(*args))


def test_names_of_keyword_arguments_count() -> None:
    step = graph(lambda self, x, *, a=None, b=None: (x if a is None else x + a) * (1 if b is None else b))
    x, two = torch.ones(2), torch.full((2,), 2.0)
    assert step(x, a=two).tolist() == [3.0, 3.0]
    assert step(x, b=two).tolist() == [2.0, 2.0]
    assert step(x, a=two).tolist() == [3.0, 3.0]


def test_the_number_of_builds_can_be_bounded() -> None:
    step = graph(lambda self, x: x * 2)
    step.config.max_builds(1)
    step(torch.ones(2))
    with pytest.raises(CaptureError) as caught:
        step(torch.ones(3))
    check_told(
        caught.value,
        "has 1 build and would need another",
        "argument x is a tensor (3,)",
        hint="max_builds is 1",
    )
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]


def test_shared_graphs_hold_the_same_modules() -> None:
    model = net()
    base, other = (graph(lambda self, x: self.model(x), model=model) for _ in range(2))
    base.enable_shared()
    base(batches(1)[0])
    other.share_from(base)
    x = torch.randn(6, 3)
    with torch.no_grad():
        model[0].weight += 1
    assert_same(model(x).detach(), other(x).detach())
    with pytest.raises(DefinitionError) as caught:
        graph(lambda self, x: self.model(x), model=net()).share_from(base)
    check_told(caught.value, "hold different modules as model", hint="give both the same module")


def test_what_is_compiled_is_saved_with_its_state(tmp_path: Path) -> None:
    """What offline compilation is for: a process that runs a graph of several shapes without building it."""
    model = net()
    step = graph(lambda self, x: self.model(x), model=model)
    inputs = [torch.randn(rows, 3) for rows in (2, 5)]
    expected = [step(x).detach() for x in inputs]
    flow.save(step, tmp_path / "deployed")
    artifact = flow.load(tmp_path / "deployed")
    assert_same(expected, [artifact(x).detach() for x in inputs])
