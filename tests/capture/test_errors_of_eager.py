"""What a step raises because of values is what eager mode raises: its kind, its text, and the user's line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support.steps import line_of

Tensor = torch.Tensor
GOOD, BAD = torch.tensor([0, 1, 2]), torch.tensor([9, 1, 2])
X = torch.linspace(0.5, 2.0, 12).reshape(3, 4)
HEADS = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 5])


def asserted(x: Tensor, n: Tensor) -> Any:
    torch._assert((n < 9).all(), "too large")  # at: asserted
    return x * 2


def checked(x: Tensor, n: Tensor) -> Any:
    torch._check_value(bool((n < 9).all()), lambda: "too large")  # at: checked
    return x * 2


def an_item(x: Tensor, n: Tensor) -> Any:
    return x[n[0].item()] * 2  # at: an_item


def an_index_tensor(x: Tensor, n: Tensor) -> Any:
    return x[n[0]] * 2  # at: an_index_tensor


def a_place_to_write(x: Tensor, n: Tensor) -> Any:
    x = x.clone()
    x[n[0]] = 1.0  # at: a_place_to_write
    return x


def selected(x: Tensor, n: Tensor) -> Any:
    return x.select(0, n[0].item()) * 2  # at: selected


def labels(x: Tensor, n: Tensor) -> Any:
    return HEADS(x, n).loss  # at: labels


BODIES = (asserted, checked, an_item, an_index_tensor, a_place_to_write, selected, labels)


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.every_case
@pytest.mark.parametrize("calls", [(BAD,), (GOOD, BAD)], ids=["first step", "later step"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_wrong_values_raise_eagers_error(body: Callable[..., Any], calls: tuple[Tensor, ...]) -> None:
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)) as eager:
        body(X, BAD)
    step = mg.trace(body)
    for good in calls[:-1]:
        step(X, good)
    with pytest.raises(type(eager.value)) as caught:
        step(X, BAD)
    assert type(caught.value) is type(eager.value)
    assert str(caught.value) == str(eager.value)
    line = line_of(body.__name__, __file__)
    # the second where the op has refused itself: torch 2.11 does not check what `select` is given
    places = (f"test_errors_of_eager.py:{line}", f'test_errors_of_eager.py", line {line},')
    assert any(place in told(caught.value) for place in places)


@pytest.mark.every_case
@pytest.mark.parametrize("calls", [(-1,), (2, -1)], ids=["first step", "later step"])
def test_an_op_says_what_its_real_kernel_says(calls: tuple[int, ...]) -> None:
    step = mg.trace(lambda x, k: x.topk(k.item()).values)
    for good in calls[:-1]:
        step(X, torch.tensor(good))
    with pytest.raises(mg.CaptureError, match="capture failed: RuntimeError: selected index k out of range"):
        step(X, torch.tensor(calls[-1]))


NUMBERS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, Any]] = {
    "topk": (lambda x, k: x.topk(k).values, 2, 9),
    "index": (lambda x, k: x[k], 2, 9),
    "dropout": (torch.nn.functional.dropout, 0.5, 9),
    "view": (lambda x, k: x.view(2, k), 6, 9),
    "full": (lambda _x, k: torch.full((2,), k, dtype=torch.int8), 3.0, 300),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_number_at_a_later_step_raises_eagers_error(name: str) -> None:
    body, good, bad = NUMBERS[name]
    with pytest.raises((IndexError, ValueError, RuntimeError)) as eager:
        body(X, bad)
    step = mg.trace(body)
    step(X, good)
    with pytest.raises(type(eager.value)) as caught:
        step(X, bad)
    assert str(eager.value) in str(caught.value)
    step(X, good)


def test_a_failed_capture_is_an_error_of_eagers_kind_too() -> None:
    with pytest.raises(RuntimeError, match="capture failed: RuntimeError: mat1 and mat2 shapes") as caught:
        mg.trace(lambda x: x @ x)(X)
    assert isinstance(caught.value, mg.CaptureError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_the_error_of_a_later_call_is_sent_as_it_is(kind: type[Exception]) -> None:
    def build(x: Tensor) -> Tensor:
        if kind is ValueError and x.shape[1] > 3:
            raise ValueError("too wide")
        return x @ torch.ones(3, 2)

    step = mg.trace(build)
    step(torch.ones(2, 3))
    with pytest.raises(kind) as caught:
        step(torch.ones(3, 5))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert isinstance(again, mg.SignatureError) is isinstance(caught.value, mg.SignatureError)
    assert (str(again), again.args) == (str(caught.value), caught.value.args)


def parameter(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x).mean


def sample(x: Tensor) -> Tensor:
    return torch.distributions.Exponential(torch.ones(3, 4)).log_prob(x)


@pytest.fixture
def distributions_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo turns the checks of distributions off for the whole process, as another test may have done."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.every_case
@pytest.mark.usefixtures("distributions_check")
@pytest.mark.parametrize("body", [parameter, sample], ids=lambda body: body.__name__)
def test_a_distribution_says_what_is_wrong(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="Expected") as eager:
        body(-X)
    step = mg.trace(body)
    step(X)
    with pytest.raises(ValueError, match="but found invalid values") as caught:
        step(-X)
    words = (
        str(eager.value).partition(", but")[0].split(" of distribution")[0].split(" of the distribution")[0]
    )
    assert str(caught.value).startswith(words)
