"""A step of a pipeline in eager mode is that of the graph on each rank, and `verify()` finds a step that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import monograph as mg
from tests.distributed import test_pipeline_random as drawing
from tests.distributed.staged import IMAGES, MICRO_BATCHES, OPTIMIZERS, Extras, Step, Task, stages_of, tied
from tests.distributed.training import Case, Wrong, assert_right, local
from tests.support import assert_same

EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))


@cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def _made(
    task: Task, optimizer: str, schedule: str, extras: Extras, *, copies: bool, rank: int, ranks: int
) -> Step:
    torch.manual_seed(0)
    model = task.make()
    num_stages = 1 + max(stage for _, stage in task.stages)
    mine = stages_of(rank, ranks, num_stages, schedule)
    for path, stage in task.stages:
        if extras.on_meta and stage not in mine:
            model.get_submodule(path).to("meta")
    step = Step(task, model, OPTIMIZERS[optimizer](model.parameters()), schedule, extras)
    if copies:
        step.config.enable_data_parallel(_mesh())
    if extras.zero:
        step.config.enable_zero(stage=extras.zero, shard_min_size=0)
    return step


def _values(step: Step, *, with_averages: bool = True) -> dict[str, Any]:
    """All that a step may change, of what is on this rank."""
    found = {name: item.clone() for name, item in step.model.state_dict().items() if not item.is_meta}
    (registered,) = [item.optimizer for item in _owned(step).optimizers]
    names = {id(item): name for name, item in step.model.to(nn.Module).named_parameters()}
    for owner, entries in registered.state.items():
        found |= {
            f"{names[id(owner)]}/{key}": local(item).clone()
            for key, item in entries.items()
            if isinstance(item, torch.Tensor) and not item.is_meta
        }
    for average in _owned(step).averages:
        found |= {f"ema/{key}": item.clone() for key, item in average.weights.items() if not item.is_meta}
    return found


def _owned(step: Step) -> Any:
    return step._monograph.owned()


def alike(
    rank: int,
    *,
    task: Task = tied(2),
    optimizer: str = "adamw",
    schedule: str = "1F1B",
    extras: Extras = Extras(),
    copies: bool = False,
) -> None:
    """Steps of the graph and in eager mode: the same results and state; `verify()` agrees and changes nothing."""
    place = _mesh().get_local_rank("dp") if copies else 0
    rank, ranks = (_mesh().get_local_rank("pp") if copies else rank), 2
    ours, other = (
        _made(task, optimizer, schedule, extras, copies=copies, rank=rank, ranks=ranks) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(7 + place)
    for index in range(3):
        factor = torch.ones(MICRO_BATCHES)
        if place == 0 and extras.infinite_in is not None and extras.infinite_in[0] == index:
            factor[extras.infinite_in[1]] = torch.inf
        batch = (*task.batch(generator), factor)
        for step in [other] * (index == 1) + [ours] * (index == 2):
            before = _values(step)
            report = step.verify(*batch)
            assert report.ok, f"step {index}: {report}"
            assert_same(before, _values(step), f"verify {index}")
        found, expected = ours(*batch), (other if index == 2 else other.eager)(*batch)
        for key in ("loss", "output", "norm"):
            assert_same(_plain(expected[key]), _plain(found[key]), f"{key} {index}")
        assert_same(_values(other), _values(ours), f"step {index}")
    assert [len(step.builds) for step in (ours, other)] == [1, 1], other.explain()


def _plain(item: Any) -> Any:
    return (
        item.full_tensor().detach()
        if hasattr(item, "full_tensor")
        else item
        if item is None
        else item.detach()
    )


QUICK: dict[str, Case] = {
    "adamw, everything": partial(alike, extras=EVERY),
    "on meta": partial(alike, extras=Extras(clip=0.3, averaged=False, on_meta=True)),
}
LONG: dict[str, Case] = {
    "images": partial(alike, task=IMAGES, optimizer="sgd"),
    "foreach, v": partial(alike, task=tied(4), optimizer="foreach", schedule="ZBVZeroBubble", extras=EVERY),
    "fused, interleaved": partial(alike, task=tied(4), optimizer="fused", schedule="Interleaved1F1B"),
}
FOUR: dict[str, Case] = {
    "copies": partial(alike, copies=True, extras=EVERY),
    "copies, zero 1": partial(alike, copies=True, extras=replace(EVERY, zero=1)),
    "copies, zero 2": partial(alike, copies=True, extras=replace(EVERY, zero=2)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_a_step_in_eager_mode_is_that_of_the_pipeline(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_more_steps_in_eager_mode(case: str, long: Wrong) -> None:
    assert_right(case, long)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_copies_of_pipelines_in_eager_mode(case: str, four: Wrong) -> None:
    assert_right(case, four)
