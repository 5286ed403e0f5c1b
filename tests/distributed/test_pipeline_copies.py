"""Copies of a pipeline, each with a batch of its own: bit for bit `DistributedDataParallel` of the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.staged import IMAGES, Extras, Task, compare, tied
from tests.distributed.training import Case, Wrong, assert_right

EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))


@cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def _copies(task: Task, schedule: str, optimizer: str, extras: Extras | None = None) -> Case:
    def case(_rank: int) -> None:
        compare(task, optimizer, schedule, _mesh().get_local_rank("pp"), extras, mesh=_mesh())
        assert torch._C._distributed_c10d._get_work_registry_size() == 0

    return case


FOUR: dict[str, Case] = {
    "1f1b sgd": _copies(tied(2), "1F1B", "sgd"),
    "1f1b adamw, everything": _copies(tied(2), "1F1B", "adamw", EVERY),
    "gpipe foreach, everything": _copies(tied(2), "GPipe", "foreach", EVERY),
    "zero bubble v, everything": _copies(tied(4), "ZBVZeroBubble", "adamw", EVERY),
    "images": _copies(IMAGES, "1F1B", "sgd"),
    "on meta": _copies(tied(2), "1F1B", "adamw", Extras(clip=0.3, on_meta=True)),
    "zero 1": _copies(tied(2), "1F1B", "adamw", replace(EVERY, zero=1)),
    "zero 2": _copies(tied(2), "1F1B", "adamw", replace(EVERY, zero=2)),
    "zero 2, sgd": _copies(IMAGES, "1F1B", "sgd", Extras(zero=2)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", FOUR)
def test_copies_of_a_pipeline_equal_copies_of_the_model(case: str, four: Wrong) -> None:
    assert_right(case, four)
