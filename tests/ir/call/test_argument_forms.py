"""What an argument is besides its values: its history, its size, a bit of negation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.meta import form
from tests.ir.call.layouts import Body, Step, numbers
from tests.support import assert_same
from tests.support.choice import only_quick

# --- negation that a view only promises ---------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float32, torch.int32]
)
def test_copies_of_what_is_negated_by_a_bit(dtype, as_argument):
    # not float16: eager mode forgets to negate what it copies there from contiguous memory
    source = torch.complex(torch.tensor([3.0, -0.0, 0.0]), torch.tensor([1.0, -2.0, 0.0]))

    def body(_self, target, given):
        negated = given if as_argument else given.conj().imag
        target.copy_(negated)
        target[:1] = negated[1:2]
        return target.clone()

    given = source.conj().imag if as_argument else source
    expected, target = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    body(None, expected, given)
    Step(body)(target, given)
    assert_same(expected, target)


# --- what a tensor is besides its values --------------------------------------------------------------------


def penalty(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return gradient.square().sum()


def backward(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad = True
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad * 1


def stop(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(False)
    return x * 2


def detach(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2) if not x.requires_grad else None
    return x.detach_() * 2


@pytest.mark.every_case
@pytest.mark.parametrize("backend", only_quick(["aten", "inductor"], "aten"))
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("body", [penalty, backward, stop, detach])
def test_the_callers_tensor_requires_grad_as_in_eager_mode(
    body: Body, requires_grad: bool, backend: Any
) -> None:
    step = Step(body)
    step.config.backend(backend)
    for _ in range(2):
        expected, given = (numbers().requires_grad_(requires_grad) for _ in range(2))
        assert_same(body(None, expected), step(given))
        assert given.requires_grad is expected.requires_grad
        assert given.is_leaf
        assert_same((expected.detach(), expected.grad), (given.detach(), given.grad))
    assert len(step.builds) == 1


@pytest.mark.parametrize("body", [stop, detach])
def test_a_gradient_that_cannot_be_stopped_is_refused(body: Body) -> None:
    leaf = numbers().requires_grad_()
    step = Step(body)
    step(numbers().requires_grad_())
    inner = leaf * 1
    with torch.no_grad(), pytest.raises(mg.CaptureError, match="stops the gradient of argument"):
        step(inner)
    assert inner.requires_grad


def add_out(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.add(a, a, out=b)
    return b + 1


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_an_empty_out_gets_a_size(backend: Any) -> None:
    step = Step(add_out)
    step.config.backend(backend)
    for empty in (torch.empty(0), torch.empty(0), torch.zeros(20).resize_(0)):
        assert_same(numbers() * 2 + 1, step(numbers(), empty))
        assert_same(numbers() * 2, empty)
    (build,) = step.builds
    _, given = build.program.graph.find_nodes(op="placeholder")
    assert form(given).shape == (0,)
    whole = torch.zeros(4)
    with pytest.raises(mg.CaptureError, match="shares the memory of another tensor"):
        step(numbers(), whole[:0])
    assert_same(torch.zeros(4), whole)


def set_data(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.data = a * 2
    return b + 1


def resize(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.resize_as_(b, a)
    return a + 1


def turn(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.t_()
    return a + 1


def put(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.set_(a * 2)
    return b + 1


@pytest.mark.parametrize("body", [add_out, set_data, resize, turn, put])
def test_another_form_of_an_argument_is_refused_before_anything_is_written(body: Body) -> None:
    model = nn.Linear(16, 1)
    before = model.weight.detach().clone()

    def train(step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        step.model(a).sum().backward()
        return body(step, a, b)

    step = Step(train, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    given = torch.zeros(3, 4)
    with pytest.raises(mg.CaptureError, match=r"args\[1\]|to \.data") as caught:
        step(numbers(), given)
    assert caught.value.where.file == __file__
    assert caught.value.hint
    assert_same(before, model.weight.detach())
    assert_same(torch.zeros(3, 4), given)
