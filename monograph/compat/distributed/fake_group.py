"""A process group of as many processes as are asked for, of which this one is the only one: no collective does anything.

What: the backend `fake` of torch's own tests. Why: a step of thousands of processes is planned in one. Degraded path: none, there
are no plans of many processes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist


def pretend_to_be(rank: int, size: int) -> None:
    """Let this process be one of so many, until it ends."""
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=size)
