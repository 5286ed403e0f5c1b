"""Assignments to `.data` and `.grad`, and gradients taken in other ways: as in eager mode, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import Plain, compare, inputs, train
from tests.support import assert_same
from tests.support.steps import detached, graph, linear, sgd


def test_data_assigned_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.weight.data = self.model.weight.data.clamp(-0.1, 0.1)
        self.model.bias.data.mul_(0.5)
        return train(self, x)

    compare(build)


def test_grad_assigned_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        for parameter in self.model.parameters():
            parameter.grad = parameter.grad * 0.5
        self.model.bias.grad.add_(1.0)
        return loss

    compare(build)


def test_grad_set_to_none_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        self.model.bias.grad = None
        return loss

    compare(build)


def test_a_changed_argument_gets_the_gradient_that_it_is_asked_to_keep():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.model.weight[0])
        x.retain_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    gradients = []
    for kind in (Plain, graph):
        step: Any = Plain(build, None) if kind is Plain else graph(build)
        step.model, x = linear(), torch.ones(4)
        if kind is graph:
            step.config.keep_gradients()
        step(x)
        gradients.append(x.grad)
    assert_same(*gradients)


def test_two_backward_calls_accumulate():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        train(self, x * 2)
        return train(self, x)

    compare(build)


def test_gradients_by_autograd_grad():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        grads = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
        return loss

    compare(build)


def test_freezing_and_thawing_inside_build():
    """As a GAN does: the discriminator is frozen while the generator is trained."""

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.weight.requires_grad_(False)
        self.model(x).sum().backward()
        self.model.weight.requires_grad_(True)
        return train(self, x)

    compare(build)


def test_freezing_for_good_inside_build_is_refused():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        self.model.bias.requires_grad_(False)
        return loss

    model = linear()
    step = graph(build, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(mg.CaptureError, match=r"requires_grad of model\.bias") as caught:
        step(torch.ones(2, 4))
    assert caught.value.hint
    assert model.bias.requires_grad


def test_parameters_reached_outside_of_the_modules():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss = loss + sum(p.square().sum() for p in self.kept["parameters"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.kept["parameters"], 0.1)
        return loss

    trails = []
    for kind in (Plain, graph):
        model = linear()
        optimizer = sgd(model)
        step: Any = Plain(build, optimizer) if kind is Plain else graph(build)
        step.model, step.kept = model, {"parameters": list(model.parameters())}
        if kind is graph:
            step.add_optimizer(optimizer)
        trails.append([(detached(step(x)), detached(list(model.parameters()))) for x in inputs(3, 5, 4)])
    assert_same(*trails)


def test_gradients_of_the_user_are_left_alone():
    model = linear()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    kept = detached(before)
    step(torch.ones(2, 4))
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert_same(kept, before)
