"""Four ranks: exactly one process where all sums are exact, else no further from float64 than twice as far as eager mode is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from tests.distributed.processes import on_ranks
from tests.distributed.test_zero import whole
from tests.distributed.training import (
    OPTIMIZERS,
    WORKLOADS,
    Case,
    Step,
    Trained,
    Wrong,
    assert_right,
    collected,
    eager_step,
)
from tests.support import assert_same

pytestmark = [pytest.mark.long, pytest.mark.ranks]
Wrap = Callable[[nn.Module], nn.Module]


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def alike(model: nn.Module) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    return model


def in_parts(model: nn.Module, mesh: Any = None) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in ("Block", "TransformerEncoderLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def copies_of_parts(model: nn.Module) -> nn.Module:
    return in_parts(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))


def parallel_and_in_parts(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batches", "columns"))
    parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["batches"])


def stage(number: int) -> Callable[[Any], None]:
    return lambda config: config.enable_zero(stage=number, shard_min_size=2)


def nothing(_config: Any) -> None:
    pass


# by name: eager mode's wrapper, that of a graph, and what is configured
LAYOUTS: dict[str, tuple[Wrap, Wrap, Callable[[Any], None]]] = {
    "wrapped": (DistributedDataParallel, DistributedDataParallel, nothing),
    "plain": (DistributedDataParallel, as_it_is, lambda config: config.enable_data_parallel()),
    **{f"stage {number}": (DistributedDataParallel, as_it_is, stage(number)) for number in (1, 2, 3)},
    "in parts": (in_parts, in_parts, nothing),
    "copies of parts": (copies_of_parts, copies_of_parts, nothing),
}


# --- sums that are exact ---------------------------------------------------------------------------------------------


def _small_numbers() -> tuple[nn.Module, torch.Tensor]:
    """Weights and a batch of whole numbers of a few bits; sizes are no multiples of four."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5, bias=False), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return model, torch.randint(-2, 3, (8, 4)).float()


class Exact(mg.Graph):
    def __init__(self, model: nn.Module, configure: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
        self.config.backend("aten")
        configure(self.config)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).sum() / 2
        loss.backward()
        return loss


def exact(rank: int, wrap: Wrap, configure: Callable[[Any], None], batches: int = 4) -> None:
    """Two steps: sums and means of ranks with so many batches are those of one process, whatever the order."""
    model, batch = _small_numbers()
    ours = wrap(copy.deepcopy(model))
    graph = Exact(ours, configure)
    for _ in range(2):
        graph(batch.chunk(batches)[rank * batches // 4])
        model.zero_grad()
        (sum(model(part).sum() / 2 for part in batch.chunk(batches)) / batches).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.125 * parameter.grad  # type: ignore[operator]
    for (name, expected), got in zip(model.named_parameters(), ours.parameters(), strict=True):
        assert_same(expected.detach(), whole(got), name)


# --- sums that are rounded -------------------------------------------------------------------------------------------


def near(rank: int, workload: str, optimizer: str, layout: str) -> None:
    """Three steps in eager mode, in float64, and in a graph; each rank has batches of its own."""
    wrapped, ours, configure = LAYOUTS[layout]
    made = WORKLOADS[workload](smoke=True)
    torch.manual_seed(rank)
    base = alike(made.make_model())
    exactly = DistributedDataParallel(copy.deepcopy(base).double())
    models = [exactly, wrapped(copy.deepcopy(base)), ours(copy.deepcopy(base))]
    sides = [Trained(model, OPTIMIZERS[optimizer](model.parameters())) for model in models]
    graph = Step(sides[2], made.loss)
    configure(graph.config)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        batch = made.make_batch(generator)
        double = tuple(item.double() if item.is_floating_point() else item for item in batch)
        eager_step(sides[0], made.loss, double)
        eager_step(sides[1], made.loss, batch)
        graph(*batch)
    expected, eager, got = ([whole(item).double() for item in model.parameters()] for model in models)
    theirs, own = (
        sum(float((a - b).square().sum()) for a, b in zip(expected, found, strict=True)) ** 0.5
        for found in (eager, got)
    )
    assert own <= 2 * theirs, f"eager mode is {theirs:.3g} from float64, the graph {own:.3g}"
    assert len(graph.builds) == 1, graph.explain()


CASES: dict[str, Case] = {
    **{
        f"exact {name}": partial(exact, wrap=wrap, configure=configure)
        for name, (_, wrap, configure) in LAYOUTS.items()
    },
    "exact parallel and in parts": partial(exact, wrap=parallel_and_in_parts, configure=nothing, batches=2),
    **{
        f"{workload} {optimizer} {layout}": partial(
            near, workload=workload, optimizer=optimizer, layout=layout
        )
        for workload, optimizer, layout in product(WORKLOADS, OPTIMIZERS, LAYOUTS)
    },
}


def run_cases() -> dict[str, str]:
    return collected(CASES, dist.get_rank())


@pytest.fixture(scope="module")
def found() -> Wrong:
    return on_ranks(run_cases, ranks=4, seconds=300.0)


@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str, found: Wrong) -> None:
    assert_right(case, found)
