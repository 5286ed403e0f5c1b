"""A process group of as many processes as are asked for, of which this one is the only one: no collective does anything.

What: the backend `fake` of torch's own tests. Why: a step of thousands of processes is planned in one. Degraded path: none, there
are no plans of many processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from monograph.compat.distributed.groups import FAKE, import_fake_collectives, torch_groups


def pretend_to_be(rank: int, size: int) -> None:
    """Let this process be one of so many, until it ends."""
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group(FAKE, store=fake.FakeStore(), rank=rank, world_size=size)


def pretend_to_have(sizes: Mapping[str, int]) -> None:
    """Let this process be in groups of these names and sizes, until it ends: a compiler asks for the groups of collectives."""
    import_fake_collectives()
    most = max(sizes.values())
    pretend_to_be(0, most)
    for name, size in sizes.items():
        group = dist.group.WORLD if size == most else dist.new_group(list(range(size)))
        torch_groups()._register_process_group(name, group)
