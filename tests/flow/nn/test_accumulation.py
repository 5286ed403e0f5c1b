"""One call is a mini-batch: what is split, what is summed, and what comes back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

import monograph as mg
import monograph.flow as flow
from monograph.errors import SignatureError
from tests.flow.steps import TrainStep, batches, check_told, graph, loss_of, net, sgd, weights
from tests.support import assert_same

STEPS = 4


def accumulating(build: Any, optimizer: Any = None, **attributes: Any) -> Any:
    step = graph(build, optimizer, **attributes)
    step.config.set_gradient_accumulation_steps(STEPS)
    return step


def test_one_call_is_one_update_of_the_summed_gradients() -> None:
    reference, model = net(), net()
    optimizer, schedules = sgd(reference, momentum=0.9), []
    own = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for item in (optimizer, own):
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(item, 0.5))
    step = TrainStep(model, own, schedules[1])
    step.config.set_gradient_accumulation_steps(STEPS)
    for x in batches(3, rows=8):
        optimizer.zero_grad()
        losses = []
        for part in x.chunk(STEPS):
            loss = loss_of(reference, part)
            (loss / STEPS).backward()
            losses.append(loss.detach())
        optimizer.step()
        schedules[0].step()
        assert_same(torch.stack(losses), step(x).detach())  # undivided, of shape (4,)
        assert_same(weights(reference), weights(model))
    assert own.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_build_sees_a_micro_batch() -> None:
    seen = []

    def build(self, x):
        seen.append(tuple(x.shape))
        return x * 2

    assert_same(torch.arange(16.0).view(8, 2) * 2, accumulating(build)(torch.arange(16.0).view(8, 2)))
    assert set(seen) == {(2, 2)}


def test_the_shapes_of_what_comes_back() -> None:
    """Scalars are stacked. All else is joined on dimension 0: also a vector of one number for each class."""

    def build(self, x):
        y = self.model(x)
        loss = y.square().mean()
        loss.backward()
        return {"loss": loss, "rows": y, "classes": y.mean(0), "kept apart": y.mean(0, keepdim=True)}

    model, x = net(), batches(1, rows=8)[0]
    rows = torch.cat([model(part) for part in x.chunk(STEPS)]).detach()
    found = accumulating(build, sgd(model), model=model)(x)
    means = [part.mean(0) for part in rows.chunk(STEPS)]
    assert_same(rows, found["rows"].detach())
    assert_same(torch.stack([part.square().mean() for part in rows.chunk(STEPS)]), found["loss"].detach())
    assert_same(torch.cat(means), found["classes"].detach())
    assert found["classes"].shape == (STEPS * 2,)
    assert_same(torch.stack(means), found["kept apart"].detach())


def test_a_vector_that_is_no_batch_is_joined_with_a_warning() -> None:
    model = flow.nn.Linear(4, 3)

    def build(self, x):
        y = self.model(x)
        y.sum().backward()
        return y, y.mean(0)

    graph = accumulating(build, sgd(model), model=model)
    with pytest.warns(
        UserWarning, match=r"a result of shape \[3\] is no batch.* joined to \[12\]; .*\[4, 3\]"
    ) as told:
        _, means = graph(flow.randn(8, 4))
    assert means.shape == (12,)
    assert len(told) == 1  # and none for the rows

    def apart(self, x):
        y = self.model(x)
        y.sum().backward()
        return y.mean(0).unsqueeze(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accumulating(apart, sgd(model), model=model)(flow.randn(8, 4)).shape == (4, 3)


def test_what_stands_on_the_summed_gradients_comes_back_once() -> None:
    def build(self, x):
        loss_of(self.model, x).backward()
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    reference, model, x = net(), net(), batches(1, rows=8)[0]
    for part in x.chunk(STEPS):
        (loss_of(reference, part) / STEPS).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert_same(expected, accumulating(build, sgd(model), model=model)(x).detach())


def weighted(self, x, y, table):
    loss = functional.cross_entropy(self.model(x), y, weight=table)
    loss.backward()
    return loss


def test_an_argument_that_is_no_batch_is_passed_whole() -> None:
    reference, model, x = net(), net(), batches(1, rows=8)[0]
    y, table = torch.tensor([0, 1] * 4), torch.tensor([1.0, 3.0])
    for part, labels in zip(x.chunk(STEPS), y.chunk(STEPS), strict=True):
        (functional.cross_entropy(reference(part), labels, weight=table) / STEPS).backward()
    sgd(reference).step()
    accumulating(weighted, sgd(model), model=model)(x, y, mg.replicated(table))
    assert_same(weights(reference), weights(model))


def test_an_argument_that_is_no_batch_and_not_marked_is_named() -> None:
    model = net()
    step = accumulating(weighted, sgd(model), model=model)
    with pytest.raises(SignatureError) as caught:
        step(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64), torch.ones(2))
    check_told(caught.value, "argument table has 2 rows", "into 4 equal", hint="mg.replicated(table)")


def test_a_batch_that_does_not_divide_is_named() -> None:
    model = net()
    step = TrainStep(model, sgd(model))
    step.config.set_gradient_accumulation_steps(STEPS)
    before = weights(model)
    with pytest.raises(SignatureError) as caught:
        step(torch.ones(6, 3))
    check_told(
        caught.value, "argument x has 6 rows", "4 equal micro-batches", hint="a multiple of set_gradient"
    )
    with pytest.raises(SignatureError) as caught:
        step(torch.tensor(1.0))
    check_told(caught.value, "argument x has no dimension", hint="mg.replicated(x)")
    assert_same(before, weights(model))


def test_random_numbers_are_drawn_for_each_micro_batch() -> None:
    step = accumulating(lambda self, x: x + torch.rand(2))
    torch.manual_seed(11)
    expected = torch.cat([torch.rand(2) for _ in range(STEPS)])
    torch.manual_seed(11)
    assert_same(expected, step(torch.zeros(8)))


def test_buffers_move_once_for_each_micro_batch() -> None:
    reference, model = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    x = batches(1, rows=8)[0]
    expected = torch.cat([reference(part) for part in x.chunk(STEPS)]).detach()
    assert_same(expected, accumulating(lambda self, x: self.model(x), model=model)(x).detach())
    assert_same(weights(reference), weights(model))
    assert int(model.num_batches_tracked) == STEPS


def test_dynamic_scaling_and_accumulation() -> None:
    """A factor of two is no rounding: the weights are those without it."""
    reference, model = net(), net()
    steps = []
    for side in (reference, model):
        steps.append(TrainStep(side, sgd(side)))
        steps[-1].config.set_gradient_accumulation_steps(2)
    steps[1].set_grad_scaler(flow.amp.GradScaler(init_scale=256.0))
    for x in batches(2):
        assert_same(steps[0](x).detach(), steps[1](x).detach())
    assert_same(weights(reference), weights(model))
