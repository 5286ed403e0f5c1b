"""Parameters in parts are whole wherever code of a module reads them, as one of its own or as another one's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.programs.collectives import calls_in_order
from tests.distributed.test_zero import whole
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


class Tied(nn.Module):
    """A weight that is used by the module around its own, after that and before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.last.bias
        return functional.linear(self.last(x), self.first.weight)


class Attention(nn.Module):
    """Hands weights of a layer inside to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x[None], x[None], x[None])[0][0]
        return found


class Lists(nn.Module):
    """Modules that hold parameters and never run."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(6, 6) / 3 for _ in range(3)])
        self.named = nn.ParameterDict({"last": torch.randn(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return x @ self.named["last"]


class Normed(nn.Module):
    """A weight that is computed at each read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.last(self.first(x)), self.first.weight)


class Shared(nn.Module):
    """A module at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inside = nn.Sequential(self.first, nn.ReLU(), nn.Linear(6, 6), self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside[2](self.inside(self.first(x)))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LSTM(6, 6), nn.GRUCell(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x[:, None])[0][:, 0]) + self.first.weight_hh_l0.sum()


class Step(mg.Graph):
    def __init__(self, model: nn.Module, configure: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(adamw(model))
        self.config.backend("aten")
        configure(self.config)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def as_it_is(_config: Any) -> None:
    pass


def trained(
    rank: int, eager: nn.Module, ours: nn.Module, configure: Callable[[Any], None] = as_it_is
) -> mg.Graph:
    """Two steps of both; each rank has batches of its own."""
    optimizer, graph = adamw(eager), Step(ours, configure)
    batches = torch.Generator().manual_seed(rank)
    for index in range(2):
        x = torch.randn(4, 6, generator=batches)
        optimizer.zero_grad()
        loss = eager(x).square().mean()
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), graph(x).detach(), f"loss {index}")
        for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert_same(whole(a), whole(b), f"step {index} {name}")
    assert len(graph.builds) == 1, graph.explain()
    return graph


def read_by_others(rank: int, kind: type[nn.Module], stage: int) -> None:
    torch.manual_seed(0)
    base = kind()
    eager = DistributedDataParallel(copy.deepcopy(base))
    trained(rank, eager, base, lambda config: config.enable_zero(stage=stage, shard_min_size=8))


def several_in_a_group(rank: int, **options: Any) -> None:
    """The parameters of all are gathered by one collective, when the first of them runs."""

    def wrapped(model: Any) -> nn.Module:
        fully_shard([model[0], model[2]], **options)
        return fully_shard(model, **options)

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6), nn.Linear(6, 6))
    graph = trained(rank, wrapped(copy.deepcopy(base)), wrapped(base))
    gathers = [op for op, _ in calls_in_order(graph.builds[0].program) if "all_gather" in str(op)]
    assert len(gathers) <= 2  # of the group, and of the others


def with_a_mesh(rank: int) -> None:
    """Parts lie over the processes that have other batches, and no others."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("others", "batches"))
    batches = mesh["batches"]
    for stage in (1, 2, 3):
        torch.manual_seed(rank)
        base = Tied()
        eager = DistributedDataParallel(copy.deepcopy(base), process_group=batches.get_group())

        def configure(config: Any, stage: int = stage) -> None:
            config.enable_data_parallel(batches)
            config.enable_zero(stage=stage, shard_min_size=8)

        trained(rank, eager, base, configure)
        if stage == 3:
            assert base.first.weight.device_mesh.size() == 2


def read_in_build(rank: int) -> None:
    """Outside of modules a parameter is a DTensor, which the error for one among plain tensors says."""

    class Outside(Step):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.model.first.weight)

    torch.manual_seed(0)
    graph = Outside(Tied(), lambda config: config.enable_zero(stage=3, shard_min_size=8))
    with pytest.raises(mg.DistributedError, match=r"whole where code of a module reads it by its name"):
        graph(torch.ones(4, 6) * rank)


QUICK: dict[str, Case] = {
    "read_in_build": read_in_build,
    **{
        f"{kind.__name__} at stage {stage}": partial(read_by_others, kind=kind, stage=stage)
        for kind in (Tied, Attention, Lists, Normed, Shared, Recurrent)
        for stage in (1, 3)
    },
    "several in a group": several_in_a_group,
    "several in a group, cast": partial(
        several_in_a_group,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "several in a group, kept": partial(several_in_a_group, reshard_after_forward=False),
}


FOUR: dict[str, Case] = {"with_a_mesh": with_a_mesh}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_parameters_are_whole_where_they_are_read(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
def test_parts_over_a_mesh_of_ones_own(four: Wrong) -> None:
    assert_right("with_a_mesh", four)
