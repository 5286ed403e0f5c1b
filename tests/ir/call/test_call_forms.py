"""One build for a call, whether its arguments are given by position or by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X, Y = torch.ones(2, 3), torch.zeros(2, 3)


class Step(mg.Graph):
    def build(self, x: Any, target: Any, scale: float = 2.0, *, shift: Any = None, **others: Any) -> Any:
        result = (x - target) * scale
        result = result if shift is None else result + shift
        return result + sum(others.values())


def test_positions_and_names_are_one_build() -> None:
    step = Step()
    for call in (
        lambda: step(X, Y),
        lambda: step(X, target=Y),
        lambda: step(x=X, target=Y),
        lambda: step(target=Y, x=X),
        lambda: step.eager(target=Y, x=X),
    ):
        assert torch.equal(call(), X * 2)
    assert len(step.builds) == 1
    assert torch.equal(copy.deepcopy(step)(target=Y, x=X), X * 2)
    assert step.verify(target=Y, x=X).ok
    assert len(step.builds) == 1


def test_the_order_of_names_means_nothing_but_to_what_is_open() -> None:
    step = Step()
    assert torch.equal(step(X, Y, shift=X, scale=3.0), step(X, Y, 3.0, shift=X))
    assert torch.equal(step(X, shift=X, target=Y, scale=3.0), X * 4)
    assert len(step.builds) == 1
    assert torch.equal(step(X, Y, shift=X), X * 3)  # without scale: another form
    assert len(step.builds) == 2
    assert torch.equal(step(X, Y, a=X), X * 3)
    assert len(step.builds) == 3


def test_compile_and_trace_know_both() -> None:
    step = mg.trace(lambda x, target: x - target)
    step.compile(x=mg.spec((2, 3)), target=mg.spec((2, 3)))
    assert torch.equal(step(X, target=Y), step(X, Y))
    assert len(step.builds) == 1


def test_the_target_of_a_train_graph() -> None:
    model = nn.Linear(3, 3)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.equal(step(X, Y), step(X, target=Y))
    assert len(step.builds) == 1
    with pytest.raises(mg.SignatureError, match="other"):
        step(X, target=Y, other=1)


def test_a_call_that_does_not_fit_is_told_as_it_was_written() -> None:
    with pytest.raises(mg.SignatureError, match="multiple values for argument 'x'") as caught:
        Step()(X, x=Y)
    assert "got 1 positional and ['x'] keyword arguments" in caught.value.hint
    with pytest.raises(mg.SignatureError, match="missing a required argument: 'target'"):
        Step()(x=X)


@pytest.mark.parametrize("call", [torch.index_select, torch.gather])
def test_an_index_of_floats_is_eager_modes_error_at_the_line(call: Any) -> None:
    index = torch.zeros(2) if call is torch.index_select else torch.zeros(2, 3)
    with pytest.raises((RuntimeError, IndexError)) as eager:
        call(X, 1, index)
    with pytest.raises((RuntimeError, mg.CaptureError), match=str(eager.value).partition("(")[0]) as caught:
        mg.trace(lambda x, i: call(x, 1, i))(X, index)  # the line
    if isinstance(caught.value, mg.CaptureError):
        assert caught.value.where is not None
        assert caught.value.where.file == __file__
        assert "integer type" in caught.value.hint
    else:
        assert type(caught.value) is type(eager.value)
        assert __file__ in "".join(caught.value.__notes__)
