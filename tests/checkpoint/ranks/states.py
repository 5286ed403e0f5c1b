"""States that ranks save and load in the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WHOLE = {
    "weight": torch.arange(7 * 3.0).view(7, 3),
    "narrow": torch.arange(6.0).view(1, 6).to(torch.bfloat16),  # shorter than ranks
    "like it": torch.ones(1, 6, dtype=torch.bfloat16),
    "bias": torch.arange(8.0),
    "scalar": torch.tensor(5.0),
    "empty": torch.empty(0, 4),
    "eight": torch.arange(6.0).to(torch.float8_e4m3fn),
    "exponents": torch.ones(3).to(torch.float8_e8m0fnu),
    "odd": torch.arange(10.0)[::2],  # it fills no block
    "turned": torch.arange(12.0).view(3, 4).t(),
}
PLACEMENTS = {
    "weight": Shard(0),
    "narrow": Shard(0),
    "like it": Shard(0),
    "bias": Replicate(),
    "eight": Shard(0),
}


def spread(name: str, placement: Any) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(WHOLE[name].clone(), mesh, [placement], src_data_rank=None)


def rank_state(step: int = 0) -> dict[str, Any]:
    """What a rank has: shards, tensors that all have, and some of its own."""
    rank = dist.get_rank()
    model = {name: spread(name, placement) for name, placement in PLACEMENTS.items()}
    model |= {name: tensor for name, tensor in WHOLE.items() if name not in PLACEMENTS}
    tied = {"again": model["weight"], "mean": torch.full((4,), float(rank)), "count": torch.tensor(1)}
    random = {"cpu": torch.arange(5) + 100 * rank}
    return {"model": model | tied, "graph.rng": random, "state.sampler": {"seen": 10 + rank}, "step": step}


def whole(value: Any) -> Any:
    """The same with whole tensors."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def expected(rank: int, step: int = 0) -> dict[str, Any]:
    """What a process that loads the state of a rank gets."""
    tied = {"again": WHOLE["weight"], "mean": torch.full((4,), float(rank)), "count": torch.tensor(1)}
    return {
        "model": {**{name: WHOLE[name] for name in PLACEMENTS}, **WHOLE, **tied},
        "graph.rng": {"cpu": torch.arange(5) + 100 * rank},
        "state.sampler": {"seen": 10 + rank},
        "step": step,
    }
