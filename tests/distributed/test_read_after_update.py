"""What a step reads of a parameter after its update is new in all rows, as under DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.programs.collectives import calls_in_order
from tests.distributed.test_zero import whole
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, outputs))


class Side:
    """Modules with an optimizer each, in eager mode or in a graph."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self.models = models
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=0.1)
            for name, model in models.items()
            if any(item.requires_grad for item in model.parameters())
        }


Body = Callable[[Side, torch.Tensor], Any]


class Step(mg.Graph):
    """A step whose body steps the optimizers itself."""

    def __init__(self, side: Side, body: Body, stage: int, backend: str = "aten") -> None:
        super().__init__()
        self.side, self.body = side, body
        for name, model in side.models.items():
            setattr(self, name, model)
        for optimizer in side.optimizers.values():
            self.add_optimizer(optimizer, manual=True)
        self.config.backend(backend)
        if stage:
            self.config.enable_zero(stage=stage, shard_min_size=8)
        else:
            self.config.enable_data_parallel()

    def build(self, x: torch.Tensor) -> Any:
        return self.body(self.side, x)


def compared(
    rank: int,
    stage: int,
    make: Callable[[], dict[str, nn.Module]],
    body: Body,
    *,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    near: bool = False,
    backend: str = "aten",
) -> mg.Graph:
    """Steps of a body both ways: what it returns and all parameters are the same, or near if the step is compiled."""
    torch.manual_seed(0)
    made = make()
    wrapped = {
        name: wrap(model) if any(p.requires_grad for p in model.parameters()) else model
        for name, model in copy.deepcopy(made).items()
    }
    eager, ours = Side(wrapped), Side(made)
    graph = Step(ours, body, stage, backend)
    batches = torch.Generator().manual_seed(rank)
    equal: Any = torch.testing.assert_close if near else assert_same
    for _ in range(3):
        x = torch.randn(4, 6, generator=batches)
        for optimizer in eager.optimizers.values():
            optimizer.zero_grad()
        expected, found = body(eager, x), graph(x)
        equal(expected.detach().clone(), whole(found))
        for name, model in eager.models.items():
            for a, b in zip(model.parameters(), made[name].parameters(), strict=True):
                (assert_same if backend == "aten" else torch.testing.assert_close)(a.detach(), whole(b))
    assert graph.builds[0].backend == backend, graph.builds[0].notes
    return graph


def two_networks(rank: int, stage: int, backend: str = "aten") -> None:
    """The second of two networks learns from the first one as it is after its update, which is gathered then and no more."""

    def body(side: Side, x: torch.Tensor) -> Any:
        first, second = side.models["first"], side.models["second"]
        made = first(x)
        judged = second(torch.cat([made.detach(), x])).square().mean()
        judged.backward()
        side.optimizers["second"].step()
        side.optimizers["second"].zero_grad()
        loss = second(made).square().mean()
        loss.backward()
        side.optimizers["second"].zero_grad()
        side.optimizers["first"].step()
        return loss

    nets = {"first": (6, 6), "second": (6, 1)}
    graph = compared(
        rank,
        stage,
        lambda: {name: net(*sizes) for name, sizes in nets.items()},
        body,
        near=backend != "aten",
        backend=backend,
    )
    if stage in (1, 2):
        gathers = [op for op, _ in calls_in_order(graph.builds[0].program) if "all_gather" in str(op)]
        assert len(gathers) == 2  # of the second network after its update, of the first one at the end


def several_steps(rank: int, stage: int) -> None:
    """An optimizer steps three times in a step."""

    def body(side: Side, x: torch.Tensor) -> Any:
        losses = []
        for _ in range(3):
            side.optimizers["model"].zero_grad()
            loss = side.models["model"](x).square().mean()
            loss.backward()
            side.optimizers["model"].step()
            losses.append(loss)
        return torch.stack(losses)

    compared(rank, stage, lambda: {"model": net(6, 2)}, body)


def averaged_by_hand(rank: int, stage: int) -> None:
    """A module whose weights build() makes, which then runs."""

    def make() -> dict[str, nn.Module]:
        model = net(6, 2)
        return {"model": model, "mean": copy.deepcopy(model).requires_grad_(False)}

    def body(side: Side, x: torch.Tensor) -> Any:
        loss = side.models["model"](x).square().mean()
        loss.backward()
        side.optimizers["model"].step()
        with torch.no_grad():
            pairs = zip(side.models["mean"].parameters(), side.models["model"].parameters(), strict=True)
            for mean, parameter in pairs:
                mean.lerp_(parameter.detach(), 0.5)
            return side.models["mean"](x)

    compared(rank, stage, make, body)


def kept_small(rank: int, stage: int) -> None:
    """Weights are cut by `.data`, of which autograd counts no change, and read."""

    def body(side: Side, x: torch.Tensor) -> Any:
        for parameter in side.models["model"].parameters():
            parameter.data.clamp_(-0.1, 0.1)
        loss = side.models["model"](x).square().mean()
        loss.backward()
        side.optimizers["model"].step()
        for parameter in side.models["model"].parameters():
            parameter.data.clamp_(-0.05, 0.05)
        return loss

    compared(rank, stage, lambda: {"model": net(6, 2)}, body)


def measured(rank: int, stage: int) -> None:
    """A norm of parameters after the update. Its sum has another order than that of whole ones."""

    def body(side: Side, x: torch.Tensor) -> Any:
        loss = side.models["model"](x).square().mean()
        loss.backward()
        side.optimizers["model"].step()
        return sum(item.detach().square().sum() for item in side.models["model"].parameters())

    compared(rank, stage, lambda: {"model": net(6, 2)}, body, near=True)


class Trainer(nn.Module):
    """Steps the optimizer of what is inside while it runs."""

    def __init__(self, net: nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.net, self.scale = net, nn.Parameter(scale)
        self.optimizer: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.net(x) * self.scale).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found: torch.Tensor = self.net(x) * self.scale
        return found


def averaging(model: nn.Module) -> nn.Module:
    """As the wrapper, also where a module that runs calls backward()."""

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def inside_of_a_module(rank: int, stage: int) -> None:
    """A module steps an optimizer while it runs, of its own weight and of those inside."""

    def body(side: Side, x: torch.Tensor) -> Any:
        trainer: Any = side.models["model"]
        trainer.optimizer = side.optimizers["model"]
        loss = trainer(x).square().mean()
        loss.backward()
        side.optimizers["model"].step()
        return loss

    compared(
        rank, stage, lambda: {"model": Trainer(net(6, 9), torch.linspace(-1, 1, 9))}, body, wrap=averaging
    )


class Changing(nn.Module):
    """Changes its own weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.mul_(0.5)
        found: torch.Tensor = self.first(x)
        return found


def changed_while_it_runs(rank: int, stage: int) -> None:
    """A change of a whole parameter stays; of one that was gathered it would be lost."""

    def body(side: Side, x: torch.Tensor) -> Any:
        loss = side.models["model"](x).square().mean()
        loss.backward()
        side.optimizers["model"].step()
        return loss

    if stage < 3:
        compared(rank, stage, lambda: {"model": Changing()}, body)
        return
    graph = Step(Side({"model": Changing()}), body, stage)
    with pytest.raises(mg.DistributedError, match=r"model\.first\.weight is changed in place") as caught:
        graph(torch.ones(4, 6))
    assert caught.value.where is not None
    assert caught.value.where.file.endswith("test_read_after_update.py")


CHECKS = (
    *(two_networks, several_steps, averaged_by_hand, kept_small, measured),
    *(inside_of_a_module, changed_while_it_runs),
)
QUICK: dict[str, Case] = {
    f"{check.__name__} at stage {stage}": partial(check, stage=stage)
    for check in CHECKS
    for stage in (0, 1, 2, 3)
}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", QUICK)
def test_updates_are_read_whole(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


SWEEP: dict[str, Case] = {
    f"compiled, stage {stage}": partial(two_networks, stage=stage, backend="inductor") for stage in (1, 3)
}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", SWEEP)
def test_compiled_updates_are_read_whole(case: str, sweep: Wrong) -> None:
    assert_right(case, sweep)
