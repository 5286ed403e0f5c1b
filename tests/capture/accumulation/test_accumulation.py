"""Gradient accumulation: one call is a mini-batch of several micro-batches, against the plain loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.cli.demo import load_example
from tests.capture.accumulation.loop import (
    BATCH,
    Batch,
    Case,
    Side,
    TrainStep,
    classes,
    clipped,
    detached,
    loss_of,
    make_batches,
    one_cycle,
    plain_loop,
)
from tests.support import assert_same
from tests.support.seen import Seen, ops_of


class Tied(nn.Module):
    """One weight at two places, and a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.c(self.b(self.a(x - self.mean).tanh()).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.reshape(-1, 3, 2))[0][:, -1])


class Powered(nn.Module):
    """Spectral norm: buffers that an iteration moves in each forward, weights computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.b = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class Carrying(nn.Module):
    """Hidden states in a list go from micro-batch to micro-batch; a norm of gradients and noise of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.hidden = [torch.zeros(3, 6), torch.ones(3, 6)]
        self.register_buffer("norm", torch.ones(()))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.hidden[0] * self.hidden[1]).tanh()
        self.hidden = [x.detach(), self.hidden[0] + 1]
        return self.last(F.dropout(x, 0.2))


def clipped_by_value(model: nn.Module) -> Any:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def noisy(model: nn.Module) -> Any:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 0.01 * torch.randn(parameter.shape)


def centred(model: nn.Module) -> Any:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(0, keepdim=True))


def decayed(model: nn.Module) -> Any:
    """Changes weights behind backward(), before the optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def adaptive(model: Any) -> Any:
    """Clips by a mean of norms that a buffer has, and adds noise of a generator."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(model.norm / norm, max=1.0))
        parameter.grad += 0.01 * torch.randn(parameter.shape, generator=model.generator)
    model.norm.lerp_(norm, 0.1)
    return norm, model.first.weight.grad


def by_calls(model: nn.Module) -> Any:
    """Reads a buffer that each micro-batch has moved."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / model.calls


def two_losses(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = model(x)
    return [F.cross_entropy(out, y), 0.1 * out.square().mean()], {
        "logits": out,
        "entropy": out.softmax(1).mean(0),
    }


def some_decayed(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Later losses reach some of the parameters only."""
    first, last = model.first.weight, model.last.weight
    return [
        0.1 * first.square().sum(),
        loss_of(model, x, y),
        0.1 * last.abs().sum(),
        0.2 * last.square().sum(),
    ], None


def penalised(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    loss = loss_of(model, x, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return [loss + slope.square().sum()], [slope.norm(dim=1)]


def weighted(model: Any, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, scale: float) -> Any:
    return [scale * F.cross_entropy(model(x), y, weight=weights)], (weights.sum(), y)


def weighted_batch(generator: torch.Generator) -> Batch:
    scale = float(torch.rand((), generator=generator))
    return (*classes(generator), torch.rand(3, generator=generator), scale)


def tokens(generator: torch.Generator) -> Batch:
    return torch.randint(32, (8, 9), generator=generator), torch.randint(32, (8, 9), generator=generator)


def gpt() -> nn.Module:
    return load_example("models/gpt").GPT(32, context=9, width=16, num_layers=2, num_heads=2, dropout=0.1)


def next_token(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return [F.cross_entropy(model(x).flatten(0, 1), y.flatten())], None


CASES = [
    Case("plain"),
    Case("two_steps", steps=2),
    Case("each_row", model=Tied, steps=BATCH),
    Case("clip", after=clipped),
    Case("clip_value", after=clipped_by_value),
    Case("noise", after=noisy),
    Case("centred", after=centred),
    Case("by_calls", after=by_calls),
    Case("two_losses", forward=two_losses, after=clipped),
    Case("some_decayed", forward=some_decayed, after=clipped),
    Case("penalty", forward=penalised, model=Tied),
    Case("recurrent", model=Recurrent),
    Case("spectral", model=Powered),
    Case("carried", model=Carrying, after=adaptive),
    Case("decayed", after=decayed),
    Case("replicated", forward=weighted, batch=weighted_batch, whole=frozenset({2})),
    Case(
        "sgd",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        scheduler=one_cycle,
    ),
    Case("radam", optimizer=lambda p: torch.optim.RAdam(p, lr=0.01)),
    Case("adafactor", optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01)),
    Case("muon_free_asgd", optimizer=lambda p: torch.optim.ASGD(p, lr=0.01)),
    Case("fused", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    Case("tensor_lr", optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01))),
    Case("amp", amp=torch.bfloat16, after=clipped),
    Case("scaler", scaled=True, after=clipped, amp=torch.float16),
    Case("average", average=True, scheduler=one_cycle),
    Case("gpt", model=gpt, forward=next_token, batch=tokens, after=clipped, scheduler=one_cycle),
]


def graph_loop(case: Case, step: TrainStep, side: Side, *, eager: bool = False) -> list[dict[str, Any]]:
    trail = []
    torch.manual_seed(1)
    for batch in make_batches(case):
        arguments = [mg.replicated(item) if index in case.whole else item for index, item in enumerate(batch)]
        returned = step.eager(*arguments) if eager else step(*arguments)
        trail.append({"returned": detached(returned), **side.state()})
        if case.average:
            average = step.state_dict()["ema.model"]
            trail[-1]["average"] = {name: tensor.clone() for name, tensor in average.items()}
    return trail


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_call_is_the_loop_over_micro_batches(case: Case, eager: bool) -> None:
    expected = plain_loop(case)
    side = Side(case)
    step = TrainStep(case, side)
    assert_same(expected, graph_loop(case, step, side, eager=eager))
    if not eager:
        assert len(step.builds) == case.builds, step.explain()
        assert [part.name for part in step.builds[0].program.parts] == ["accumulate", "update"]


def test_the_programs_run_so_often() -> None:
    """A dispatch mode sees the ops of `accumulate` for each micro-batch, and those of `update` once."""
    case = Case("counted", steps=3)
    side = Side(case)
    step = TrainStep(case, side)
    (batch, *_) = make_batches(case)
    step(*batch)
    with Seen() as seen:
        step(*batch)
    assert seen.ops["native_batch_norm"] + seen.ops["_native_batch_norm_legit_functional"] == 3
    assert seen.ops["stack"] + seen.ops["cat"] >= 1
    accumulate, update = map(ops_of, step.builds[0].program.parts)
    once = {name: count for name, count in update.items() if name not in accumulate and name != "add"}
    assert once
    assert {name: seen.ops[name] for name in once} == once


@pytest.mark.long
def test_another_number_of_steps_is_another_build() -> None:
    case = Case("steps", steps=3)
    side = Side(case)
    step = TrainStep(case, side)
    (batch, *_) = make_batches(case)
    assert step(*batch)[0][0].shape == (3,)
    step.config.set_gradient_accumulation_steps(2)
    assert step(*batch)[0][0].shape == (2,)
    step.config.set_gradient_accumulation_steps(1)
    assert step(*batch)[0][0].shape == ()
    assert "configuration" in step.builds[1].reason
    assert "accumulation_steps=1" in repr(step.config)


def test_compiled_from_shapes() -> None:
    case = Case("specs", forward=weighted, batch=weighted_batch, whole=frozenset({2}))
    side = Side(case)
    step = TrainStep(case, side)
    labels = mg.spec((BATCH,), torch.int64)
    step.compile(mg.spec((BATCH, 6)), labels, mg.replicated(mg.spec((3,))), 0.5)
    expected = plain_loop(case)
    assert_same(expected, graph_loop(case, step, side))
    assert len(step.builds) == 1


def test_the_sum_of_gradients_lies_as_autograd_lays_it_out() -> None:
    """Row by row, for a parameter that has gaps between its numbers."""

    class Gaps(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.weight = nn.Parameter(torch.randn(6, 4).t()[:, ::2])
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.model.weight
            (x @ weight).square().sum().backward()
            return weight.grad.view(-1)

    torch.manual_seed(0)
    step, x = Gaps(), torch.randn(6, 4)
    weight = step.model.weight.detach().requires_grad_()
    (x @ weight).square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(step(x), weight.grad.view(-1) / 2)
