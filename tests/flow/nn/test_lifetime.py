"""What may change between two calls, what a step leaves behind, and that calls are done when they return."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn as torch_nn

import monograph.flow as flow
from tests.flow.steps import (
    TrainStep,
    batches,
    check_told,
    graph,
    infer,
    loss_of,
    net,
    plain,
    sgd,
    trained,
    weights,
)
from tests.support import assert_same

SCALE = 2.0


# --- what build() reads from Python -------------------------------------------------------------------------------------


def test_train_and_eval_are_heeded() -> None:
    model = torch_nn.Sequential(torch_nn.Linear(3, 4), torch_nn.Dropout(0.5), torch_nn.BatchNorm1d(4))
    reference, x = copy.deepcopy(model), batches(1)[0]
    step = infer(model)
    for mode in (True, False, True):
        model.train(mode)
        reference.train(mode)
        torch.manual_seed(5)
        expected = reference(x).detach()
        torch.manual_seed(5)
        assert_same(expected, step(x).detach())
    assert_same(weights(reference), weights(model))
    assert len(step.builds) == 2  # the third call fits the first build
    assert "training" in step.builds[1].reason


def test_an_edited_learning_rate_is_used() -> None:
    reference, model = net(), net()
    optimizers = sgd(reference), sgd(model)
    step = TrainStep(model, optimizers[1])
    for rate, x in zip((0.1, 0.5, 0.001), batches(3), strict=True):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        assert_same(plain(reference, optimizers[0], [x]), trained(step, [x]))
    assert_same(weights(reference), weights(model))
    assert len(step.builds) == 1


def test_the_rate_of_a_scheduler_can_be_read() -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = flow.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    step, seen = TrainStep(model, optimizer, scheduler), []
    for x in batches(4):
        step(x)
        seen.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), scheduler.last_step))
    assert seen == [(0.1, [0.1], 1), (0.05, [0.05], 2), (0.05, [0.05], 3), (0.025, [0.025], 4)]


def test_a_number_among_the_arguments_is_heeded() -> None:
    model, x = net(), batches(1)[0]
    step = graph(lambda self, x, factor: self.model(x) * factor, model=model)
    for factor, builds in ((2, 1), (3, 2), (2, 2), (0.5, 3), (0.25, 3)):  # a float is an input
        assert_same((model(x) * factor).detach(), step(x, factor).detach())
        assert len(step.builds) == builds


def test_a_number_among_the_attributes_is_heeded() -> None:
    model, x = net(), batches(1)[0]
    model.factor = 2.0
    step = graph(lambda self, x: self.model(x) * self.model.factor + self.shift, model=model, shift=1)
    assert_same((model(x) * 2 + 1).detach(), step(x).detach())
    model.factor = 3.0
    assert_same((model(x) * 3 + 1).detach(), step(x).detach())
    step.shift = 5
    assert_same((model(x) * 3 + 5).detach(), step(x).detach())


def test_globals_and_closures_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    offset, x = 1.0, torch.ones(2)
    step = graph(lambda self, x: x * SCALE + offset)
    assert step(x).tolist() == [3.0, 3.0]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 10.0)
    offset = 5.0
    assert step(x).tolist() == [15.0, 15.0]
    assert len(step.builds) == 2


def test_what_build_does_in_python_happens_in_each_step() -> None:
    seen: list[str] = []

    def build(self, x):
        seen.append("run")
        return x * 2

    step = graph(build)
    for _ in range(3):
        step(torch.ones(2))
    assert seen == ["run"] * 3


def test_a_replaced_parameter_is_the_one_that_is_read() -> None:
    model, x = net(), batches(1)[0]
    step = infer(model)
    step(x)
    model[0].weight = torch_nn.Parameter(torch.ones(4, 3))
    assert_same(model(x).detach(), step(x).detach())
    model[2] = torch_nn.Linear(4, 2)
    assert_same(model(x).detach(), step(x).detach())


def test_a_parameter_that_the_optimizer_does_not_know_is_told() -> None:
    model, x = net(), batches(1)[0]
    step = TrainStep(model, sgd(model))
    step(x)
    model[0].weight = torch_nn.Parameter(torch.ones(4, 3))
    with pytest.raises(
        Exception, match=r"optimizer\.0 \(SGD\) holds a parameter of shape \(4, 3\)"
    ) as caught:
        step(x)
    check_told(caught.value, "that no module of the graph holds", hint="self.model = model")


@pytest.mark.parametrize("change", ["in place", "assigned data", "state dict"])
def test_changed_values_are_seen(change: str) -> None:
    model, x = net(), batches(1)[0]
    step = infer(model)
    step(x)
    with torch.no_grad():
        if change == "in place":
            model[0].weight.mul_(2.0)
        elif change == "assigned data":
            model[0].weight.data = torch.ones(4, 3)
        else:
            model.load_state_dict(net(seed=9).state_dict())
    assert_same(model(x).detach(), step(x).detach())


def test_a_failed_build_can_be_tried_again() -> None:
    model, x = net(), batches(1)[0]
    broken = [True]

    def build(self, x):
        if broken:
            raise ZeroDivisionError("not yet")
        return self.model(x)

    step = graph(build, model=model)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="not yet"):
            step(x)
    assert not step.is_compiled
    broken.clear()
    assert_same(model(x).detach(), step(x).detach())


def test_a_wrong_call_does_no_harm() -> None:
    reference, model = net(), net()
    step = TrainStep(model, sgd(model))
    first, second = batches(2)
    step(first)
    with pytest.raises(Exception, match="argument x is a tensor"):
        step(torch.ones(4, 5))
    step(second)
    plain(reference, sgd(reference), [first, second])
    assert_same(weights(reference), weights(model))


# --- what a step leaves behind -----------------------------------------------------------------------------------------


def test_gradients_are_left_as_they_were() -> None:
    model, x = net(), batches(1)[0]
    TrainStep(model, sgd(model))(x)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_can_be_kept_and_read() -> None:
    reference, model, x = net(), net(), batches(1)[0]
    loss_of(reference, x).backward()
    step = TrainStep(model, sgd(model))
    step.config.keep_gradients()
    step(x)
    assert_same([p.grad for p in reference.parameters()], [p.grad for p in model.parameters()])


def test_outputs_have_no_gradient_history() -> None:
    model = net()
    step = TrainStep(model, sgd(model))
    loss = step(batches(1)[0])
    assert (loss.requires_grad, loss.grad_fn) == (False, None)
    assert loss.numpy() == loss.item()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_outputs_of_earlier_calls_stay() -> None:
    step = infer(net())
    first = step(batches(1)[0])
    kept = first.detach().clone()
    for x in batches(4):
        step(x)
    assert_same(kept, first.detach())


def test_all_buffers_go_on() -> None:
    class Counting(torch_nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layer, self.norm = torch_nn.Linear(3, 2), torch_nn.BatchNorm1d(2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            self.calls += 1
            y = self.norm(self.layer(x))
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y * self.calls

    reference, model = Counting(), Counting()
    plain(reference, sgd(reference), batches(3))
    trained(TrainStep(model, sgd(model)), batches(3))
    assert_same(weights(reference), weights(model))
    assert (int(model.calls), int(model.norm.num_batches_tracked)) == (3, 3)


def test_an_argument_changed_in_place_is_the_callers() -> None:
    step = graph(lambda self, x: x.mul_(2).sum())
    x = torch.ones(3)
    assert step(x).item() == 6.0
    assert x.tolist() == [2.0, 2.0, 2.0]
    step(x)
    assert x.tolist() == [4.0, 4.0, 4.0]


def test_hooks_take_effect() -> None:
    reference, model = net(), net()
    for side in (reference, model):
        side[0].register_forward_hook(lambda module, inputs, output: output * 2)
        side[2].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
        side[0].weight.register_hook(lambda gradient: gradient.sign())
    losses = plain(reference, sgd(reference), batches(2))
    assert_same(losses, trained(TrainStep(model, sgd(model)), batches(2)))
    assert_same(weights(reference), weights(model))


def test_a_hook_that_comes_later_is_heeded() -> None:
    model, x = net(), batches(1)[0]
    step = infer(model)
    before = step(x).detach()
    handle = model.register_forward_hook(lambda module, inputs, output: output + 1)
    assert_same(before + 1, step(x).detach())
    handle.remove()
    assert_same(before, step(x).detach())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_eager_training(set_to_none: bool) -> None:
    """The weights move on, and so does the momentum, whether gradients of before are there or not."""
    reference, model = net(), net()
    optimizer = sgd(model, momentum=0.9)
    expected = plain(reference, sgd(reference, momentum=0.9), batches(5))
    losses = plain(model, optimizer, batches(5)[:2])
    optimizer.zero_grad(set_to_none=set_to_none)
    step = TrainStep(model, optimizer)
    losses += trained(step, batches(5)[2:4])
    losses += plain(model, optimizer, batches(5)[4:])  # and eager mode goes on from the graph
    assert_same(expected, losses)
    assert_same(weights(reference), weights(model))


def test_gradients_of_before_do_not_count() -> None:
    reference, model, x = net(), net(), batches(1)[0]
    loss_of(model, x).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    plain(reference, sgd(reference), [x])
    TrainStep(model, sgd(model))(x)
    assert_same(weights(reference), weights(model))
    assert_same(before, [parameter.grad for parameter in model.parameters()])


# --- calls, threads, the end -------------------------------------------------------------------------------------------


def test_a_step_is_done_when_the_call_returns() -> None:
    """What was read right behind a call is what is there later."""
    model = net()
    step = TrainStep(model, sgd(model))
    step.config.set_outputs_buffer_size(1)
    losses, after = [], []
    for x in batches(3):
        losses.append((loss := step(x), loss.item()))
        after.append(weights(model))
    reference = net()
    optimizer = sgd(reference)
    for x, state in zip(batches(3), after, strict=True):
        plain(reference, optimizer, [x])
        assert_same(weights(reference), state)
    assert [loss.item() for loss, _ in losses] == [number for _, number in losses]


def test_threads_may_call_graphs() -> None:
    model, data, found = net(), batches(8), {}
    shared = infer(model)

    def work(index: int, step: Callable[..., Any]) -> None:
        found[index] = [step(x).detach() for x in data]

    threads = [
        threading.Thread(target=work, args=(index, step))
        for index, step in enumerate((shared, shared, infer(model)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [model(x).detach() for x in data]
    assert_same([expected] * 3, [found[index] for index in range(3)])


def test_a_graph_can_be_freed() -> None:
    model = net()
    step = TrainStep(model, sgd(model))
    step(batches(1)[0])
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


@pytest.mark.long
def test_a_process_ends_cleanly() -> None:
    code = (
        "import torch, monograph.flow as flow, monograph.flow.nn as nn\n"
        "class Double(nn.Graph):\n"
        "    def build(self, x):\n"
        "        return x * 2\n"
        "double = Double()\n"
        "print(double(torch.ones(2)).tolist())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[2.0, 2.0]\n", "")
