"""Parameters over a mesh of two dimensions: fully_shard around parallelize_module, and copies of shards, as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import monograph as mg
from monograph.distributed import placement, sbp, to_global
from tests.distributed.training import Case, Wrong, assert_right, local
from tests.support import assert_same


class Block(nn.Module):
    """Layers of which columns and rows are on other ranks, with sizes that are no multiples of four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, and layers that are in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.between, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.between(self.first(x))))


class Blocks(nn.Module):
    """Blocks alone: all that is trained is over one mesh, so that one norm clips it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


PLANS: dict[str, dict[str, Any]] = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequences": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    },
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def both_ways(model: Net, mesh: Any, plan: str, **options: Any) -> nn.Module:
    """A model whose blocks are parallel within the second dimension of the mesh, and all in parts over the first."""
    for block in (model.first, model.second):
        parallelize_module(block, mesh["tp"], PLANS[plan])
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float, steps: int) -> None:
        super().__init__()
        self.model, self.clip = model, clip
        self.add_optimizer(optimizer)
        self.config.backend("aten")
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


def trained(models: list[nn.Module], optimizer: str, seed: int, *, clip: float = 0.0, steps: int = 1) -> None:
    """Steps of both, eager mode first. `seed` is that of the batches."""
    eager, ours = models
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    graph = Step(ours, optimizers[1], clip, steps)
    generator = torch.Generator().manual_seed(seed)
    for index in range(3):
        x = torch.randn(2 * steps, 4, 6, generator=generator)
        losses = []
        for part in x.chunk(steps):
            losses.append(eager(part).square().mean())
            (losses[-1] / steps).backward()
        if clip:
            nn.utils.clip_grad_norm_(eager.parameters(), clip)
        optimizers[0].step()
        optimizers[0].zero_grad()
        expected = torch.stack(losses) if steps > 1 else losses[0]
        assert_same(expected.detach(), graph(x).detach(), f"loss {index}")
        for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
            assert_same(local(a), local(b), f"step {index} {name}")
            states = [item.state[p] for item, p in zip(optimizers, (a, b), strict=True)]
            for key in states[0]:
                assert_same(local(states[0][key]), local(states[1][key]), f"step {index} {name}/{key}")
    assert len(graph.builds) == 1, graph.explain()


def tensor_parallel(
    _rank: int, shape: tuple[int, int], plan: str, optimizer: str = "adamw", **options: Any
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    base = Net() if "clip" not in options else Blocks()
    whole = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    models: list[nn.Module] = []
    for _ in range(2):
        model: Any = copy.deepcopy(base)
        if isinstance(model, Net):
            models.append(both_ways(model, mesh, plan))
            continue
        for block in (model.first, model.second):
            parallelize_module(block, mesh["tp"], whole | PLANS["sequences"])
            fully_shard(block, mesh=mesh["dp"])
        models.append(fully_shard(model, mesh=mesh["dp"]))
    trained(models, optimizer, mesh["dp"].get_local_rank(), **options)


def casting(_rank: int, shape: tuple[int, int]) -> None:
    """Values are gathered and gradients reduced in other types."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    base = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [both_ways(copy.deepcopy(base), mesh, "columns and rows", mp_policy=policy) for _ in range(2)]
    trained(models, "adamw", mesh["dp"].get_local_rank())


def copies_of_shards(rank: int, shape: tuple[int, int], optimizer: str = "adamw", **options: Any) -> None:
    """Gradients are scattered within the second dimension of the mesh, and what is scattered is added over the first."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    base = Net()
    models: list[nn.Module] = []
    for _ in range(2):
        model = copy.deepcopy(base)
        for block in (model.first, model.second):
            fully_shard(block, mesh=mesh)
        models.append(fully_shard(model, mesh=mesh))
    trained(models, optimizer, rank, **options)


def _cases(shape: tuple[int, int]) -> dict[str, Case]:
    return {
        **{
            f"{plan} {optimizer}": partial(tensor_parallel, shape=shape, plan=plan, optimizer=optimizer)
            for plan, optimizer in product(PLANS, OPTIMIZERS)
        },
        "parallel and clipped": partial(tensor_parallel, shape=shape, plan="sequences", clip=0.1),
        "parallel and accumulated": partial(tensor_parallel, shape=shape, plan="sequences", steps=2),
        "parallel and cast": partial(casting, shape=shape),
        "copies": partial(copies_of_shards, shape=shape),
        "copies sgd": partial(copies_of_shards, shape=shape, optimizer="sgd"),
        "copies clipped": partial(copies_of_shards, shape=shape, clip=0.1),
        "copies accumulated": partial(copies_of_shards, shape=shape, steps=2),
    }


QUICK: dict[str, Case] = {
    f"{name} on {shape}": case
    for shape in ((2, 1), (1, 2))
    for name, case in _cases(shape).items()
    if name in ("columns and rows adamw", "sequences sgd", "parallel and clipped", "copies")
}


def ranks_in_any_order(rank: int) -> None:
    """Each way to lay a tensor out over a grid, from each other one; the ranks of the grid ascend or not."""
    whole = torch.arange(144.0).reshape(12, 12)
    kinds = (sbp.broadcast, sbp.split(0), sbp.split(1), sbp.partial_sum)
    grids = [placement("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[3, 1], [2, 0]])]
    for there, kind in product(grids, product(kinds, kinds[:2])):
        shared = to_global(to_global(whole, grids[0], [sbp.broadcast] * 2), there, kind)
        assert_same(whole, shared.full_tensor())
        for here, other in product(grids, product(kinds[:2], kinds[:3])):
            assert_same(whole, to_global(shared, here, other).full_tensor())


FOUR = {**_cases((2, 2)), "ranks in any order": ranks_in_any_order}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_meshes_of_two_ranks(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_meshes_of_four_ranks(case: str, four: Wrong) -> None:
    assert_right(case, four)
