"""Several backwards and optimizers under a gradient scaler.

Each body is written once. On the plain side `how` scales, unscales and steps as torch's recipes do; in a graph it does
what a user writes who knows of no scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer, RMSprop

import monograph as mg
from tests.amp.mixed import growing, infinite_at
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401


class Plain:
    """How plain PyTorch does it."""

    def __init__(self, pair: Pair) -> None:
        self.scaler, self.amp = pair.scaler, pair.amp

    @contextmanager
    def forward(self) -> Iterator[None]:
        with torch.autocast("cpu", dtype=self.amp or torch.bfloat16, enabled=self.amp is not None):
            yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.scaler.scale(loss).backward(**options)

    def unscale(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)


class InGraph:
    """What a user of a Graph writes."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)

    def unscale(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()


class Pair:
    """Two models with an optimizer each, and one scaler."""

    def __init__(self, amp: torch.dtype | None) -> None:
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
        self.make_opt = AdamW(self.maker.parameters(), lr=2e-3)
        self.judge_opt = RMSprop(self.judge.parameters(), lr=1e-3)
        self.scaler, self.amp = growing(), amp

    def state(self) -> dict[str, Any]:
        """Optimizer state is left out while plain PyTorch has none."""
        return {
            "models": [{k: v.clone() for k, v in m.state_dict().items()} for m in (self.maker, self.judge)],
            "optimizers": [
                [{k: v.clone() for k, v in entries.items()} for entries in optimizer.state.values()]
                for optimizer in (self.make_opt, self.judge_opt)
            ],
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def fooled(scores: torch.Tensor, target: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores.float(), torch.full_like(scores, target).float())


def adversarial(pair: Any, how: Any, x: torch.Tensor, clip: bool = False) -> Any:
    """The judge first, then the maker, whose backward goes through the judge that has stepped."""
    with how.forward():
        fake = pair.maker(torch.randn(x.shape[0], 3))
        judge_loss = fooled(pair.judge(x), 1.0) + fooled(pair.judge(fake.detach()), 0.0)
    pair.judge_opt.zero_grad()
    how.backward(judge_loss)
    with how.forward(), torch.no_grad():
        score = pair.judge(x).mean()  # weights are cast here, and change right after
    if clip:
        how.unscale(pair.judge_opt)
        nn.utils.clip_grad_norm_(pair.judge.parameters(), 0.1)
    how.step(pair.judge_opt)
    with how.forward():
        make_loss = fooled(pair.judge(fake), 1.0)
    pair.make_opt.zero_grad()
    how.backward(make_loss)
    how.step(pair.make_opt)
    return judge_loss, make_loss, score


def adversarial_clipped(pair: Any, how: Any, x: torch.Tensor) -> Any:
    return adversarial(pair, how, x, clip=True)


def independent(pair: Any, how: Any, x: torch.Tensor) -> Any:
    """Gradients of one model are read before the backward of the other."""
    with how.forward():
        first = pair.judge(x).float().square().mean()
    how.backward(first)
    how.unscale(pair.judge_opt)
    norm = nn.utils.clip_grad_norm_(pair.judge.parameters(), 0.05)
    with how.forward():
        second = pair.maker(x[:, :3].clamp(-3, 3)).float().square().mean()
    how.backward(second)
    how.step(pair.judge_opt)
    how.step(pair.make_opt)
    return first, second, norm


def summed(pair: Any, how: Any, x: torch.Tensor) -> Any:
    """Two backwards add up; one is no scalar, and one goes only to some parameters."""
    with how.forward():
        out = pair.judge(pair.maker(x[:, :3].clamp(-3, 3)) + x)
        scores = out.float().squeeze(1)
        loss = scores.square().mean()
    how.backward(loss, retain_graph=True)
    how.backward(scores, gradient=torch.linspace(0, 0.1, x.shape[0]), retain_graph=True)
    how.backward(scores.mean(), inputs=[pair.maker[3].weight])
    how.step(pair.judge_opt)
    how.step(pair.make_opt)
    return loss, scores


def penalty(pair: Any, how: Any, x: torch.Tensor) -> Any:
    """A gradient penalty: autograd.grad is not scaled, the backward through it is."""
    with how.forward():
        between = x.clamp(-3, 3).requires_grad_(True)
        gradient = torch.autograd.grad(pair.judge(between).float().sum(), between, create_graph=True)[0]
        loss = (gradient.norm(2, dim=1) - 1).square().mean() + pair.judge(x).float().mean()
    how.backward(loss)
    how.step(pair.judge_opt)
    with how.forward():
        other = pair.judge(pair.maker(torch.randn(4, 3))).float().mean()
    pair.make_opt.zero_grad()
    how.backward(other)
    how.step(pair.make_opt)
    return loss, other


class PairStep(mg.Graph):
    def __init__(self, pair: Pair, body: Callable[..., Any]) -> None:
        super().__init__()
        self.maker, self.judge, self.body = pair.maker, pair.judge, body
        for optimizer in (pair.make_opt, pair.judge_opt):
            self.add_optimizer(optimizer, manual=True)
        self.make_opt, self.judge_opt = pair.make_opt, pair.judge_opt
        self.set_grad_scaler(pair.scaler)
        if pair.amp is not None:
            self.config.enable_amp(dtype=pair.amp)

    def build(self, x: torch.Tensor) -> Any:
        return self.body(self, InGraph(), x)


def plain_pair_step(pair: Pair, body: Callable[..., Any], x: torch.Tensor) -> Any:
    pair.make_opt.zero_grad()
    pair.judge_opt.zero_grad()
    returned = body(pair, Plain(pair), x)
    pair.scaler.update()
    return returned


def values(returned: Any) -> list[torch.Tensor]:
    return [item.detach().clone() for item in returned]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("body", "amp"),
    [
        (adversarial, None),
        (adversarial, torch.bfloat16),
        (adversarial_clipped, torch.float16),
        (independent, None),
        (independent, torch.float16),
        (summed, torch.bfloat16),
        (penalty, None),
        (penalty, torch.bfloat16),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_two_optimizers_that_build_steps(body: Callable[..., Any], amp: torch.dtype | None) -> None:
    at = (1, 3) if body is not penalty else ()
    inputs = [x for x, _ in infinite_at(*at, count=5)]
    plain = Pair(amp)
    torch.manual_seed(1)
    expected = [(values(plain_pair_step(plain, body, x)), plain.state()) for x in inputs]
    for eager in (True, False):
        pair = Pair(amp)
        step = PairStep(pair, body)
        torch.manual_seed(1)
        for index, x in enumerate(inputs):
            returned = values((step.eager if eager else step)(x))
            assert_same(
                expected[index], (returned, pair.state()), f"{'eager' if eager else 'graph'} step {index}"
            )
    assert len(step.builds) == 1


class Both(mg.Graph):
    """Two optimizers that step at the end of build(); infinities reach only the first."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.maker, self.judge = pair.maker, pair.judge
        self.add_optimizer(pair.judge_opt)
        self.add_optimizer(pair.make_opt)
        self.set_grad_scaler(pair.scaler)

    def build(self, x: torch.Tensor) -> Any:
        return two_losses(self, InGraph(), x)


def two_losses(pair: Any, how: Any, x: torch.Tensor) -> Any:
    loss = pair.judge(x).square().mean()
    how.backward(loss)
    other = pair.maker(x[:, 3:]).square().mean()
    how.backward(other)
    return loss, other


def test_one_of_two_optimizers_skips_and_the_scale_is_shared() -> None:
    plain, inputs = Pair(None), [x for x, _ in infinite_at(1, 2, count=5)]
    torch.manual_seed(1)
    expected = []
    for x in inputs:
        plain.make_opt.zero_grad()
        plain.judge_opt.zero_grad()
        losses = values(two_losses(plain, Plain(plain), x))
        plain.scaler.step(plain.judge_opt)
        plain.scaler.step(plain.make_opt)
        plain.scaler.update()
        expected.append((losses, plain.state()))
    pair = Pair(None)
    step = Both(pair)
    torch.manual_seed(1)
    assert_same(expected, [(values(step(x)), pair.state()) for x in inputs], "step")
    assert {float(entries["step"]) for entries in pair.judge_opt.state.values()} == {3.0}
    assert {float(entries["step"]) for entries in pair.make_opt.state.values()} == {5.0}
