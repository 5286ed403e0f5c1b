"""Wrong arguments and results give their named errors: what happened, at which line of the user's, and what to do."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monograph as mg
from tests.graph.error_checks import Tagged, check, forward, quantised, sgd
from tests.support import assert_same
from tests.support.steps import graph, linear

# --- arguments ----------------------------------------------------------------------------------------------


class Masked(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = linear()

    def build(self, x, y, scale=1.0):
        out = self.model(x)  # at: model
        return (out * y[0]["mask"]).sum() * scale  # at: mask


def good() -> tuple[Any, ...]:
    return torch.ones(5, 4), [{"mask": torch.ones(5, 3), "label": torch.ones(5)}]


class Thing:
    """Something that no graph can take."""


def with_mask(mask: Any) -> tuple[Any, ...]:
    return good()[0], [{"mask": mask, "label": torch.ones(5)}]


MISFITS: dict[str, tuple[Callable[[], tuple[Any, ...]], list[str], str]] = {
    "shape of a nested tensor": (
        lambda: with_mask(torch.ones(5, 7)),
        ['y[0]["mask"]', "(5, 7)", "(5, 3)"],
        "mask",
    ),
    "shape": (lambda: (torch.ones(5, 6), good()[1]), ["argument x", "(5, 6)", "(5, 4)"], "model"),
    "number of dimensions": (lambda: (torch.ones(()), good()[1]), ["argument x", "()", "(5, 4)"], "model"),
    "dtype": (
        lambda: (torch.ones(5, 4, dtype=torch.float64), good()[1]),
        ["argument x", "float64", "float32"],
        "model",
    ),
    "device": (
        lambda: (torch.ones(5, 4, device="meta"), good()[1]),
        ["argument x", "on meta", "on cpu"],
        "model",
    ),
    "None for a tensor": (lambda: with_mask(None), ['y[0]["mask"]', "None", "(5, 3)"], "mask"),
    "an int for a tensor": (lambda: (3, good()[1]), ["argument x", "3 (int)", "(5, 4)"], "model"),
    "a string for a float": (lambda: (*good(), "big"), ["argument scale", "'big' (str)", "a float"], "mask"),
    "a list for a dict": (
        lambda: (good()[0], [[torch.ones(5, 3)]]),
        ["argument y[0]", "list", "dict"],
        "mask",
    ),
    "a key is missing": (
        lambda: (good()[0], [{"label": torch.ones(5)}]),
        ["argument y[0]", '"mask"'],
        "mask",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_argument_that_does_not_fit_after_a_good_call(name):
    make, parts, at = MISFITS[name]
    step = Masked()
    args = (*make(), *([1.0] if len(make()) == 2 else []))
    with pytest.raises(Exception) as alone:  # noqa: PT011  # whatever it is
        Masked()(*args)
    first = step(*good(), 1.0)
    with pytest.raises(type(alone.value)) as caught:
        step(*args)
    error, cause = caught.value, alone.value
    assert isinstance(error, mg.SignatureError)  # and of the kind of the cause
    if isinstance(cause, mg.MonographError):  # the cause as without a call before, and behind it what differs
        assert (error.message, error.source) == (cause.message, cause.source)
        assert error.hint.startswith(cause.hint)
        check(error, at=at)
        told = error.hint.removeprefix(cause.hint)
    else:
        assert error.message == str(cause)
        told = error.hint
    for part in ("no call before had such arguments: ", *parts):
        assert part in told
    assert_same(first, step(*good(), 1.0))
    assert len(step.builds) == 1


@pytest.mark.parametrize("ask", ["__call__", "verify", "profile", "memory"])
def test_a_step_of_train_graph_without_its_batch(ask: str):
    model = linear()
    step = mg.train_graph(model, torch.nn.MSELoss(), sgd(model))
    with pytest.raises(mg.SignatureError) as caught:
        getattr(step, ask)()
    check(caught.value, "the target as the last argument", "pass a batch")


def test_a_misfit_that_only_the_first_call_has_is_told_by_its_line():
    step = Masked()
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(5, 6), good()[1])
    check(caught.value, "5x6", at="model", is_clear=True)


COUNTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[str]]] = {
    "too few": ((good()[0],), {}, ["missing", "'y'", "build(x, y, scale=1.0)"]),
    "too many": ((*good(), 1.0, 2.0), {}, ["too many", "4 positional"]),
    "an unknown keyword": (good(), {"scales": 1.0}, ["'scales'"]),
    "twice": (good(), {"x": torch.ones(5, 4)}, ["'x'"]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", COUNTS)
def test_the_count_of_arguments(name, first):
    args, kwargs, parts = COUNTS[name]
    step = Masked()
    if not first:
        step(*good())
    with pytest.raises(mg.SignatureError) as caught:
        step(*args, **kwargs)  # at: count
    check(caught.value, *parts, at="count")


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(5, 3)


def masked_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(5, 3), torch.ones(5, 3, dtype=torch.bool))


class Encoded(UserDict[str, torch.Tensor]):
    """As that of a tokenizer: it holds more than the tensors."""

    def __init__(self, **content: torch.Tensor) -> None:
        super().__init__(content)
        self.encodings = [object()]


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


UNTAKEN: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a numpy array": (lambda: np.ones((5, 3)), ["numpy.ndarray", "torch.from_numpy"]),
    "a numpy number": (lambda: np.float32(1), ["numpy.float32"]),
    "an object": (Thing, ["Thing"]),
    "a set": (lambda: {1, 2}, ["set", "sorted tuple"]),
    "an encoded batch": (lambda: Encoded(a=torch.ones(5, 3)), ["Encoded", "pass dict(batch)"]),
    "an object with slots": (lambda: Slotted(torch.ones(5, 3)), ["Slotted", "it has __slots__"]),
    "a function": (lambda: len, ["is a function"]),
    "a module": (lambda: linear(), ["Linear"]),
    "an iterator": (lambda: iter([1]), ["list_iterator"]),
    "a tensor made under inference_mode": (inference_tensor, ["inference_mode"]),
    "a sparse tensor of blocks": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), ["sparse", "to_dense"]),
    "a sparse tensor that is trained": (
        lambda: torch.ones(5, 3).to_sparse().requires_grad_(),
        ["requires grad", "torch.sparse_coo_tensor(indices, values, size)"],
    ),
    "a quantised tensor": (quantised, ["quantised", "dequantize"]),
    "a subclass of Tensor": (lambda: torch.ones(5, 3).as_subclass(Tagged), ["Tagged", "subclass"]),
    "a masked tensor": (masked_tensor, ["MaskedTensor"]),
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged),
        ["a nested tensor", "tensor.unbind()", "tensor.to_padded_tensor(0.0)"],
    ),
    "a nested tensor with strides": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)]),
        ["a nested tensor", "tensor.unbind()"],
    ),
}


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNTAKEN)
def test_an_argument_that_no_graph_takes(name):
    make, parts = UNTAKEN[name]
    step = Masked()
    with pytest.raises(mg.SignatureError) as caught:
        step(*with_mask(make()))  # at: untaken
    check(caught.value, 'y[0]["mask"]', *parts, at="untaken")


def test_a_graph_is_an_argument_that_no_graph_takes():
    with pytest.raises(mg.SignatureError) as caught:
        Masked()(Masked(), [])
    check(caught.value, "argument x", "Masked")


def test_an_argument_with_a_history_outside():
    outer = torch.ones(5, 4, requires_grad=True)
    step = Masked()
    with pytest.raises(mg.GraphBoundaryError) as caught:
        step(outer * 2, good()[1])  # at: history
    check(caught.value, "argument x", "detach()", at="history")
    with torch.no_grad():
        step(outer * 2, good()[1])
        mixed = torch.ones(5, 4, requires_grad=True).expand(5, 4)
        assert mixed.grad_fn is None or mixed.requires_grad
    with torch.no_grad():
        assert_same(step(outer * 2, good()[1]), step((outer * 2).detach(), good()[1]))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.jacrev])
def test_a_call_inside_of_a_functional_transform(transform):
    step = graph(lambda self, x: (x * 2).sum())
    with pytest.raises(mg.GraphBoundaryError) as caught:
        transform(step)(torch.ones(2))
    check(caught.value, "argument x", "torch.func")


def test_a_spec_is_for_compile():
    step = Masked()
    with pytest.raises(mg.SignatureError) as caught:
        step(mg.spec((5, 4)), good()[1])  # at: spec
    check(caught.value, "spec", "compile()", at="spec")
    assert not step.builds


# --- what crosses the border on the way out -----------------------------------------------------------------


def test_an_output_in_a_backward_outside():
    step = graph(forward, model=linear())
    out = step(torch.ones(2, 4))
    assert out.requires_grad
    with pytest.raises(mg.GraphBoundaryError) as caught:
        out.sum().backward()  # at: boundary
    check(caught.value, "backward()", "build()", at="boundary")


def test_an_output_mixed_into_a_graph_of_autograd_outside():
    step = graph(forward, model=linear())
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(mg.GraphBoundaryError) as caught:
        (step(torch.ones(2, 4)) * w).sum().backward()  # at: mixed
    check(caught.value, "backward()", "detach()", at="mixed")
    (step(torch.ones(2, 4)).detach() * w).sum().backward()
    assert w.grad is not None


def test_the_loss_of_a_step_has_no_second_backward():
    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss

    step = graph(build, model=(model := linear()))
    step.add_optimizer(sgd(model))
    loss = step(torch.ones(2, 4))
    with pytest.raises(mg.GraphBoundaryError) as caught:
        loss.backward()
    check(caught.value)


UNRETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a distribution": lambda x: torch.distributions.Normal(x, x.abs() + 1),
    "a set of tensors": lambda x: {x * 2},
    "an iterator": lambda x: iter([x * 2]),
    "a generator": lambda x: (item for item in [x * 2]),
    "a closure": lambda x: lambda: x * 2,
    "an object": lambda x: vars(thing := Thing()).update(value=[x * 2]) or thing,
}


@pytest.mark.parametrize("name", UNRETURNED)
def test_a_result_that_cannot_be_returned(name):
    step = graph(lambda self, x: UNRETURNED[name](x))
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(2))
    check(caught.value, "build() returns a")


def test_results_that_are_no_tensors_are_returned_as_they_are():
    thing = Thing()
    step = graph(lambda self, x: (thing, "text", None, 3, {1, 2}, len, x.shape, x.dtype), thing=thing)
    for _ in range(2):
        assert step(torch.ones(2)) == (thing, "text", None, 3, {1, 2}, len, torch.Size([2]), torch.float32)


def test_an_output_that_requires_grad_can_be_changed_in_place():
    step = graph(forward, model=(model := linear()))
    out = step(torch.ones(2, 4))
    out /= 2
    out += 1
    assert_same((model(torch.ones(2, 4)) / 2 + 1).detach(), out.detach())
    with pytest.raises(mg.GraphBoundaryError):
        out.sum().backward()


def test_an_output_changed_in_place_by_the_user_is_theirs():
    step = graph(forward, model=linear())
    first = step(torch.ones(2, 4))
    kept = first.detach().clone()
    with torch.no_grad():
        first.mul_(0)
    assert_same(kept, step(torch.ones(2, 4)).detach())
