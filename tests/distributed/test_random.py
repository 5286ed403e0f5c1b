"""Random ops of several ranks: each rank's own on plain tensors, as in eager mode, and one draw of all on DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from tests.distributed.test_zero import whole
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.dropout(self.first(x), 0.5, self.training))


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def of_each_rank(
    rank: int, eager: Callable[[nn.Module], nn.Module], ours: Callable[[nn.Module], nn.Module], stage: int = 0
) -> None:
    """What a rank draws is what eager mode draws there, and its generator is left as eager mode leaves it."""

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = models[1]
            self.add_optimizer(optimizers[1])
            self.config.backend("aten")
            if stage:
                self.config.enable_zero(stage=stage, shard_min_size=2)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    torch.manual_seed(0)
    base = Dropping()
    models = [eager(copy.deepcopy(base)), ours(copy.deepcopy(base))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    graph, batches = Step(), torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    for index in range(2):
        x, before = torch.randn(4, 6, generator=batches), torch.get_rng_state()
        optimizers[0].zero_grad()
        loss = models[0](x).square().mean()
        loss.backward()
        optimizers[0].step()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        assert_same(loss.detach(), graph(x).detach(), f"loss {index}")
        assert_same(after, torch.get_rng_state(), f"generator {index}")
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert_same(whole(a), whole(b), f"step {index}")


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "randint_like": lambda x: torch.randint_like(x, 100),
}


class Draw(mg.Graph):
    """Gives what this rank has, and the whole."""

    def __init__(self, weight: torch.Tensor, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.draw = nn.ParameterList([weight]), draw
        self.config.backend("aten")

    def build(self) -> Any:
        made: Any = self.draw(self.model[0] * 1.0)
        return made.to_local(), made.full_tensor()


def of_all(rank: int, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Ranks with other seeds have the same whole, which is that of one process with the seed of the first."""
    torch.manual_seed(0)
    with torch.no_grad():
        expected = draw(torch.ones(5, 4))
    for placement in (Shard(0), Shard(1), Replicate()):
        weight = distribute_tensor(torch.ones(5, 4), init_device_mesh("cpu", (2,)), [placement])
        graph = Draw(weight, draw)
        torch.manual_seed(rank)
        with torch.no_grad():
            local, got = graph()
        assert_same(expected, got, str(placement))
        part = (
            distribute_tensor(expected, weight.device_mesh, [placement])
            if isinstance(weight, DTensor)
            else None
        )
        assert part is not None
        assert_same(part.to_local(), local, str(placement))


def likely(rank: int) -> None:
    """Draws of elements that are more and less likely; a copy has the same everywhere."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.linspace(0, 1, 20).reshape(5, 4), mesh, [Replicate()])
    graph = Draw(weight, torch.bernoulli)
    torch.manual_seed(rank)
    with torch.no_grad():
        _, got = graph()
    first = distribute_tensor(got, mesh, [Replicate()]).to_local()  # that of the first rank
    assert_same(first, got)
    assert got[0, 0] == 0
    assert got[-1, -1] == 1


QUICK: dict[str, Case] = {
    "wrapped": partial(of_each_rank, eager=DistributedDataParallel, ours=DistributedDataParallel),
    "in parts": partial(of_each_rank, eager=fully_shard, ours=fully_shard),
    **{
        f"stage {stage}": partial(of_each_rank, eager=DistributedDataParallel, ours=as_it_is, stage=stage)
        for stage in (1, 3)
    },
    **{name: partial(of_all, draw=draw) for name, draw in DRAWS.items()},
    "bernoulli": likely,
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_random_ops(case: str, quick: Wrong) -> None:
    assert_right(case, quick)
