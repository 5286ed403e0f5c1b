"""Two optimizers that build() steps itself: fresh noise, explicit generators, critics, gradient penalties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import Side, assert_same
from tests.support.case import STEPS


class Pair:
    """A generator and a discriminator with their optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        judge = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
        self.maker = Side(maker, torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9)))
        self.judge = Side(judge, torch.optim.RMSprop(judge.parameters(), lr=1e-3))
        self.maker.scheduler = torch.optim.lr_scheduler.StepLR(self.maker.optimizer, 2, 0.5)
        self.noise = torch.Generator().manual_seed(5)

    def state(self) -> dict[str, Any]:
        return {"maker": self.maker.state(), "judge": self.judge.state(), "noise": self.noise.get_state()}


def fooled(scores: torch.Tensor, target: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def classic(maker: Any, judge: Any, make_opt: Any, judge_opt: Any, noise: Any, real: torch.Tensor) -> Any:
    """The discriminator first, then the generator, noise from the global random state."""
    fake = maker(torch.randn(real.shape[0], 3))
    judge_loss = fooled(judge(real), 1.0) + fooled(judge(fake.detach()), 0.0)
    judge_opt.zero_grad()
    judge_loss.backward()
    judge_opt.step()
    make_loss = fooled(judge(fake), 1.0)
    make_opt.zero_grad()
    make_loss.backward()
    make_opt.step()
    return judge_loss, make_loss


def with_generator(
    maker: Any, judge: Any, make_opt: Any, judge_opt: Any, noise: Any, real: torch.Tensor
) -> Any:
    """Noise from an explicit torch.Generator, in several ways."""
    z = torch.randn(real.shape[0], 3, generator=noise)
    z = z + torch.empty_like(z).normal_(generator=noise) + torch.rand(3, generator=noise)
    fake = maker(z)
    keep = torch.bernoulli(torch.full_like(real, 0.9), generator=noise)
    judge_loss = fooled(judge(real * keep), 1.0) + fooled(judge(fake.detach()), 0.0)
    judge_loss.backward()
    judge_opt.step()
    make_opt.zero_grad(set_to_none=True)
    make_loss = fooled(judge(maker(torch.randn(4, 3, generator=noise))), 1.0)
    make_loss.backward()
    make_opt.step()
    return judge_loss, make_loss, z


def critic(maker: Any, judge: Any, make_opt: Any, judge_opt: Any, noise: Any, real: torch.Tensor) -> Any:
    """WGAN: two critic steps with clipped weights for one generator step."""
    losses = []
    for _ in range(2):
        judge_opt.zero_grad()
        with torch.no_grad():
            fake = maker(torch.randn(real.shape[0], 3))
        loss = judge(fake).mean() - judge(real).mean()
        loss.backward()
        judge_opt.step()
        for parameter in judge.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        losses.append(loss)
    make_opt.zero_grad()
    loss = -judge(maker(torch.randn(real.shape[0], 3))).mean()
    loss.backward()
    make_opt.step()
    return losses, loss


def gradient_penalty(
    maker: Any, judge: Any, make_opt: Any, judge_opt: Any, noise: Any, real: torch.Tensor
) -> Any:
    """WGAN-GP: double backward through the discriminator, which is frozen while the generator learns."""
    fake = maker(torch.randn(real.shape[0], 3)).detach()
    mix = torch.rand(real.shape[0], 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    gradient = torch.autograd.grad(judge(between).sum(), between, create_graph=True)[0]
    penalty = (gradient.norm(2, dim=1) - 1).square().mean()
    loss = judge(fake).mean() - judge(real).mean() + 10 * penalty
    judge_opt.zero_grad()
    loss.backward()
    judge_opt.step()
    judge.requires_grad_(False)
    make_loss = -judge(maker(torch.randn(real.shape[0], 3))).mean()
    make_opt.zero_grad()
    make_loss.backward()
    make_opt.step()
    judge.requires_grad_(True)
    return loss, make_loss, penalty


class GanStep(mg.Graph):
    def __init__(self, pair: Pair, step: Callable[..., Any]) -> None:
        super().__init__()
        self.maker, self.judge = pair.maker.model, pair.judge.model
        self.add_optimizer(pair.maker.optimizer, lr_sch=pair.maker.scheduler, manual=True)
        self.add_optimizer(pair.judge.optimizer, manual=True)
        self.make_opt, self.judge_opt = pair.maker.optimizer, pair.judge.optimizer
        self.noise = pair.noise
        self.step = step

    def build(self, real):
        return self.step(self.maker, self.judge, self.make_opt, self.judge_opt, self.noise, real)


def eager_step(pair: Pair, step: Callable[..., Any], real: torch.Tensor) -> Any:
    pair.maker.optimizer.zero_grad()  # gradients are None when build() starts
    pair.judge.optimizer.zero_grad()
    returned = step(
        pair.maker.model, pair.judge.model, pair.maker.optimizer, pair.judge.optimizer, pair.noise, real
    )
    pair.maker.scheduler.step()
    return returned


@pytest.mark.one_case
@pytest.mark.parametrize(
    "step", [classic, with_generator, critic, gradient_penalty], ids=lambda f: f.__name__
)
def test_a_gan_trains_with_eager_bits(step: Callable[..., Any]) -> None:
    eager, graph = Pair(), Pair()
    train = GanStep(graph, step)
    torch.manual_seed(1)
    states = []
    generator = torch.Generator().manual_seed(3)
    reals = [torch.randn(4, 4, generator=generator) for _ in range(STEPS)]
    for real in reals:
        states.append((eager_step(eager, step, real), eager.state()))
    torch.manual_seed(1)
    for index, (real, (losses, state)) in enumerate(zip(reals, states, strict=True)):
        assert_same(losses, train(real), f"losses {index}")
        assert_same(state, graph.state(), f"step {index}")
    assert len(train.builds) == 1


class JudgeStep(mg.Graph):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.maker, self.judge = pair.maker.model, pair.judge.model
        self.add_optimizer(pair.judge.optimizer)

    def build(self, real):
        with torch.no_grad():
            fake = self.maker(torch.randn(real.shape[0], 3))
        loss = fooled(self.judge(real), 1.0) + fooled(self.judge(fake), 0.0)
        loss.backward()
        return loss


class MakerStep(mg.Graph):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.maker, self.judge = pair.maker.model, pair.judge.model
        self.add_optimizer(pair.maker.optimizer, lr_sch=pair.maker.scheduler)

    def build(self):
        loss = fooled(self.judge(self.maker(torch.randn(4, 3))), 1.0)
        loss.backward()
        return loss


@pytest.mark.long
def test_two_graphs_over_one_pair_alternate():
    eager, graph = Pair(), Pair()
    torch.manual_seed(1)
    expected = []
    generator = torch.Generator().manual_seed(3)
    reals = [torch.randn(4, 4, generator=generator) for _ in range(STEPS)]
    for real in reals:
        with torch.no_grad():
            fake = eager.maker.model(torch.randn(4, 3))
        eager.judge.optimizer.zero_grad()
        judge_loss = fooled(eager.judge.model(real), 1.0) + fooled(eager.judge.model(fake), 0.0)
        judge_loss.backward()
        eager.judge.optimizer.step()
        eager.maker.optimizer.zero_grad()
        make_loss = fooled(eager.judge.model(eager.maker.model(torch.randn(4, 3))), 1.0)
        make_loss.backward()
        eager.maker.optimizer.step()
        eager.maker.scheduler.step()
        expected.append(([judge_loss, make_loss], eager.state()))
    judge_step, maker_step = JudgeStep(graph), MakerStep(graph)
    torch.manual_seed(1)
    for index, (real, (losses, state)) in enumerate(zip(reals, expected, strict=True)):
        assert_same(losses, [judge_step(real), maker_step()], f"losses {index}")
        assert_same(state, graph.state(), f"step {index}")
    assert len(judge_step.builds) == len(maker_step.builds) == 1
