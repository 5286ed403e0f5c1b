"""enable_zero() trains as eager DistributedDataParallel, bit for bit on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.programs.collectives import calls_in_order
from tests.distributed.training import (
    OPTIMIZERS,
    WORKLOADS,
    Case,
    Step,
    Trained,
    Wrong,
    assert_right,
    eager_step,
)
from tests.support import assert_same

ALL = ("mlp", "mobilenet", "gpt", "lstm", "dlrm")


class Net(nn.Module):
    """A weight that two modules share, rows that ranks cannot share evenly, and small ones that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.last = nn.Linear(7, 7)
        self.last.weight = self.again.weight
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.again(self.first(x).tanh())))


class NetStep(mg.Graph):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, clip: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self.clip = model, clip
        self.add_optimizer(optimizer)
        self.config.backend("aten")
        self.config.enable_zero(stage=stage, shard_min_size=8)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


class Sides:
    """A net in eager mode under DistributedDataParallel, and a plain one in a graph."""

    def __init__(
        self,
        rank: int,
        stage: int,
        make: Callable[..., torch.optim.Optimizer],
        clip: float = 0.0,
        tied: bool = True,
    ) -> None:
        torch.manual_seed(rank)
        base = Net()
        if not tied:
            base.last = nn.Linear(7, 7)
        self.eager, self.ours = DistributedDataParallel(copy.deepcopy(base)), base
        self.optimizers = [make(model.parameters()) for model in (self.eager, self.ours)]
        self.graph = NetStep(self.ours, self.optimizers[1], stage, clip)
        self.batches = torch.Generator().manual_seed(7 + rank)

    def batch(self, rows: int = 4) -> torch.Tensor:
        return torch.randn(rows, 6, generator=self.batches)

    def check(self, what: str) -> None:
        ours = {name: whole(item) for name, item in self.ours.state_dict().items()}
        assert_same({name: item.clone() for name, item in self.eager.module.state_dict().items()}, ours, what)


def whole(item: Any) -> torch.Tensor:
    found: torch.Tensor = item.full_tensor() if hasattr(item, "full_tensor") else item
    return found.detach().clone()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _workload(rank: int, workload: str, optimizer: str, stage: int) -> None:
    made = WORKLOADS[workload](smoke=True)
    torch.manual_seed(rank)
    base = made.make_model()
    sides = []
    for model in (DistributedDataParallel(copy.deepcopy(base)), base):
        sides.append(Trained(model, OPTIMIZERS[optimizer](model.parameters())))
    step = Step(sides[1], made.loss)
    step.config.enable_zero(stage=stage, shard_min_size=20)
    generator = torch.Generator().manual_seed(100 + rank)
    for index in range(3):
        batch = made.make_batch(generator)
        assert_same(eager_step(sides[0], made.loss, batch), step(*batch).detach(), f"loss {index}")
        expected, got = (side.model.state_dict().items() for side in sides)
        for (name, a), (_, b) in zip(expected, got, strict=True):
            assert_same(a.clone(), whole(b), f"step {index} {name}")
    assert len(step.builds) == 1, step.explain()


def trained(rank: int, stage: int, make: Callable[..., torch.optim.Optimizer] = adamw) -> None:
    """Steps of an optimizer; the number of elements that its state has here is half of the whole."""
    sides = Sides(rank, stage, make)
    for index in range(3):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        loss = sides.eager(x).square().mean()
        loss.backward()
        sides.optimizers[0].step()
        assert_same(loss.detach(), sides.graph(x).detach(), f"loss {index}")
        sides.check(f"step {index}")
    assert len(sides.graph.builds) == 1, sides.graph.explain()


def compiled_first(rank: int, stage: int) -> None:
    """A build that is made before there are data declares the first state of parts, too."""
    sides = Sides(rank, stage, adamw)
    sides.graph.compile(mg.spec((4, 6)))
    x = sides.batch()
    loss = sides.eager(x).square().mean()
    loss.backward()
    sides.optimizers[0].step()
    assert_same(loss.detach(), sides.graph(x).detach())
    sides.check("step")
    assert len(sides.graph.builds) == 1


def clipped(rank: int, stage: int) -> None:
    """The norm is that of all parts. Its sum has another order than that of whole gradients: it is near."""
    sides = Sides(rank, stage, adamw, clip=0.1)
    for _ in range(2):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        sides.eager(x).square().mean().backward()
        nn.utils.clip_grad_norm_(sides.eager.parameters(), 0.1)
        sides.optimizers[0].step()
        sides.graph(x)
        for a, b in zip(sides.eager.parameters(), sides.ours.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), whole(b))


def accumulated(rank: int, stage: int) -> None:
    """Stage 1 reduces gradients once, stages 2 and 3 for each micro-batch: in another order than eager mode."""
    sides = Sides(rank, stage, adamw)
    sides.graph.config.set_gradient_accumulation_steps(2)
    for _ in range(2):
        x = sides.batch(8)
        sides.optimizers[0].zero_grad()
        first, last = x.chunk(2)
        with sides.eager.no_sync():
            (sides.eager(first).square().mean() / 2).backward()
        (sides.eager(last).square().mean() / 2).backward()
        sides.optimizers[0].step()
        sides.graph(x)
        for (name, a), b in zip(sides.eager.named_parameters(), sides.ours.parameters(), strict=True):
            if stage == 1:
                assert_same(a.detach(), whole(b), name)
            torch.testing.assert_close(a.detach(), whole(b))
    scattered = [op for op, _ in calls_in_order(sides.graph.builds[0].program) if "reduce_scatter" in str(op)]
    assert len(scattered) == (1 if stage == 1 else 2)


def scaled(rank: int, stage: int) -> None:
    """An infinity in one rank's part lets all skip the step, though others have parts of other placements."""
    sides = Sides(rank, stage, adamw)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    sides.graph.set_grad_scaler(scalers[1])
    for index in range(4):
        x = sides.batch()
        if rank and index == 1:
            x[0, 0] = float("inf")
        sides.optimizers[0].zero_grad()
        scalers[0].scale(sides.eager(x).square().mean()).backward()
        scalers[0].step(sides.optimizers[0])
        scalers[0].update()
        sides.graph(x)
        assert scalers[0].get_scale() == scalers[1].get_scale(), index
        for (name, a), b in zip(sides.eager.named_parameters(), sides.ours.parameters(), strict=True):
            assert_same(a.detach(), whole(b), f"{index} {name}")
    assert scalers[1].get_scale() == 2.0**8


def averaged(rank: int, stage: int) -> None:
    sides = Sides(rank, stage, adamw)
    sides.graph.add_ema(sides.ours, 0.9)
    mean: list[torch.Tensor] = []
    for _ in range(3):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        sides.eager(x).square().mean().backward()
        sides.optimizers[0].step()
        present = [item.detach().clone() for item in sides.eager.parameters()]
        mean = [old.lerp(new, 1 - 0.9) for old, new in zip(mean, present, strict=True)] if mean else present
        sides.graph(x)
    with sides.graph.ema_weights():
        assert_same(mean, [whole(item) for item in sides.ours.parameters()])


def kept(rank: int, stage: int, steps: int = 1) -> None:
    """Gradients that stay are DTensors: of each this process has what it updates, and all have that of eager mode."""
    sides = Sides(rank, stage, adamw)
    sides.graph.config.keep_gradients()
    sides.graph.config.set_gradient_accumulation_steps(steps)
    for index in range(2):
        x = sides.batch(4 * steps)
        sides.optimizers[0].zero_grad()
        if steps > 1:
            with sides.eager.no_sync():
                (sides.eager(x[:4]).square().mean() / steps).backward()
        (sides.eager(x[-4:]).square().mean() / steps).backward()
        sides.optimizers[0].step()
        if steps > 1:
            sides.ours.zero_grad()
        sides.graph(x)
        for (name, a), b in zip(sides.eager.named_parameters(), sides.ours.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert isinstance(b.grad, DTensor)
            assert (b.grad.to_local().numel() < a.numel()) == (a.numel() >= 8), name
            if steps == 1 or stage == 1:
                assert_same(a.grad, whole(b.grad), f"step {index} {name}")
            torch.testing.assert_close(a.grad, whole(b.grad))
        sides.check(f"step {index}") if steps == 1 else None
    assert len(sides.graph.builds) == 1, sides.graph.explain()


def kept_and_added(rank: int, stage: int) -> None:
    """A gradient that build() does not use stays, and the next step adds to it."""

    class Adding(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = base
            self.add_optimizer(ours, manual=True)
            self.config.backend("aten")
            self.config.keep_gradients()
            self.config.enable_zero(stage=stage, shard_min_size=8)

        def build(self, x: torch.Tensor, *, last: bool) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            if last:
                ours.step()
                ours.zero_grad()
            return loss

    torch.manual_seed(rank)
    base = Net()
    eager = DistributedDataParallel(copy.deepcopy(base))
    optimizer, ours = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, base))
    graph = Adding()
    batches = torch.Generator().manual_seed(7 + rank)
    for index in range(4):
        x = torch.randn(4, 6, generator=batches)
        eager(x).square().mean().backward()
        graph(x, last=index % 2 == 1)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(eager.parameters(), base.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), whole(b))
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, whole(b.grad))


def cast(rank: int, stage: int) -> None:
    """Modules run in bfloat16, and what is gathered and reduced is float32."""
    sides = Sides(rank, stage, adamw, tied=False)  # else eager mode adds gradients in bfloat16
    sides.graph.config.enable_amp(dtype=torch.bfloat16)
    for index in range(2):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = sides.eager(x).square().mean()
        loss.backward()
        sides.optimizers[0].step()
        assert_same(loss.detach(), sides.graph(x).detach(), f"loss {index}")
        sides.check(f"step {index}")


def two_optimizers(rank: int, stage: int) -> None:
    """Each has some of the parameters, and build() steps one itself; a frozen one has none."""

    class Two(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = base
            self.add_optimizer(ours[0])
            self.add_optimizer(ours[1], manual=True)
            self.config.backend("aten")
            self.config.enable_zero(stage=stage, shard_min_size=8)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            ours[1].step()
            return loss

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        trained = [item for item in model.parameters() if item.requires_grad]
        return [torch.optim.SGD(trained[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(trained[1:], lr=0.01)]

    torch.manual_seed(rank)
    base = Net()
    base.first.bias.requires_grad_(False)
    eager = DistributedDataParallel(copy.deepcopy(base))
    theirs, ours = optimizers(eager), optimizers(base)
    graph = Two()
    batches = torch.Generator().manual_seed(7 + rank)
    for index in range(2):
        x = torch.randn(4, 6, generator=batches)
        eager.zero_grad()
        eager(x).square().mean().backward()
        for item in theirs:
            item.step()
        graph(x)
        for (name, a), b in zip(eager.named_parameters(), base.parameters(), strict=True):
            assert_same(a.detach(), whole(b), f"step {index} {name}")


def saved(rank: int, stage: int) -> None:
    """The state of a graph goes into another one, which goes on as the first."""
    sides, others = Sides(rank, stage, adamw), Sides(rank, stage, adamw)
    sides.graph(sides.batch())
    others.graph(others.batch())
    others.graph.load_state_dict(copy.deepcopy(sides.graph.state_dict()))
    x = sides.batch()
    assert_same(sides.graph(x).detach(), others.graph(x).detach())
    for a, b in zip(sides.ours.parameters(), others.ours.parameters(), strict=True):
        assert_same(whole(a), whole(b))


CHECKS = (
    *(trained, compiled_first, clipped, accumulated, scaled, averaged, kept, kept_and_added),
    *(cast, two_optimizers, saved),
)
_CHECKED: dict[str, Case] = {
    f"{check.__name__} at stage {stage}": partial(check, stage=stage)
    for check in CHECKS
    for stage in (1, 2, 3)
} | {f"kept and accumulated at stage {stage}": partial(kept, stage=stage, steps=2) for stage in (1, 2, 3)}
_FEW = (
    "trained at stage 1",
    "trained at stage 3",
    "clipped at stage 3",
    "scaled at stage 1",
    "saved at stage 3",
)
QUICK: dict[str, Case] = {
    name: case for name, case in _CHECKED.items() if name in _FEW or name.endswith("at stage 2")
}
SWEEP: dict[str, Case] = {name: case for name, case in _CHECKED.items() if name not in QUICK} | {
    f"{workload} {optimizer} at stage {stage}": partial(
        _workload, workload=workload, optimizer=optimizer, stage=stage
    )
    for workload in ALL
    for optimizer in ("adamw", "sgd")
    for stage in (1, 2, 3)
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_a_graph_does_as_the_wrapper(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", SWEEP)
def test_training_is_that_of_eager_mode(case: str, sweep: Wrong) -> None:
    assert_right(case, sweep)


@pytest.mark.parametrize("call", ["enable_zero", "enable_data_parallel"])
def test_a_single_process_is_refused_by_the_name_of_the_call(call: str) -> None:
    model = nn.Linear(4, 3)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    getattr(step.config, call)()
    with pytest.raises(mg.DistributedError, match=f"^{call}\\(\\) in a single process"):
        step(torch.ones(2, 4), torch.ones(2, 3))
