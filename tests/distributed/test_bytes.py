"""What is sent, counted at the process group, is what is planned to the byte, and so is what ranks hold.

A ring sends (N-1)/N of what is gathered or scattered, and twice that of a sum. The bounds are those of DistributedDataParallel,
and of ZeRO with parameters in parts; the number of collectives is compared with `fully_shard` in eager mode.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.compat.distributed.groups import group_size
from monograph.distributed.planning.report import RanksPlan
from monograph.distributed.programs.transfers import transfers_of
from monograph.runtime.one_piece import most_allocated
from tests.distributed.counted import Sent, count_from_now_on, counted, payload
from tests.distributed.processes import on_ranks
from tests.distributed.test_planning import Staged
from tests.distributed.training import OPTIMIZERS, WORKLOADS, Step, Trained, eager_step, local

STAGES = {"parallel": None, "zero1": 1, "zero2": 2, "zero3": 3}
LAYOUTS = ("ddp", *STAGES, "fully_shard")
EAGER = ("ddp", "fully_shard")


@dataclass(frozen=True)
class Measured:
    """What a step of one rank sent, by whom it was foretold, and what it held."""

    sent: tuple[Sent, ...]
    foretold: tuple[int, int] = (0, 0)  # collectives of the build, and their payload
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    peaks: tuple[int, ...] = ()
    planned_peak_bytes: int = 0
    kernel_bytes: int = 0


def sharded(model: nn.Module) -> nn.Module:
    """As users do it: each block, and the rest."""
    for module in model.modules():
        if type(module).__name__ in ("Block", "InvertedResidual"):
            fully_shard(module)
    return fully_shard(model)


KERNELS = 6000  # bytes that kernels of these small models take for themselves, which plans leave out


def wrapped(layout: str, model: nn.Module) -> nn.Module:
    wrappers: dict[str, Callable[[Any], Any]] = {"ddp": DistributedDataParallel, "fully_shard": sharded}
    return wrappers.get(layout, lambda plain: plain)(model)


def measured(workload: str, layout: str, rank: int, *, eager: bool) -> Measured:
    made = WORKLOADS[workload](smoke=True)
    torch.manual_seed(rank)
    model = wrapped(layout, made.make_model())
    trained = Trained(model, OPTIMIZERS["adamw"](model.parameters()))
    batch = made.make_batch(torch.Generator().manual_seed(rank))
    if eager:
        for _ in range(3):  # DistributedDataParallel arranges its buckets anew meanwhile
            eager_step(trained, made.loss, batch)
        with counted() as sent:
            eager_step(trained, made.loss, batch)
        return Measured(tuple(sent))
    step = Step(trained, made.loss)
    configure(step, layout)
    step(*batch)
    step(*batch)
    with counted() as sent:
        step(*batch)
    # threads of gloo let go of what was sent a little sooner or later
    peaks = tuple(most_allocated(lambda: step(*batch), everywhere=True) or 0 for _ in range(10))
    transfers = [*transfers_of(step.builds[0].program, group_size)]
    memory = step.memory(*batch)
    return Measured(
        tuple(sent),
        (len(transfers), sum(item.payload_bytes for item in transfers)),
        held(parts_of(trained.model.parameters())),
        held(parts_of(states_of(trained.optimizer))),
        peaks,
        memory.peak_bytes,
        memory.kernel_bytes,
    )


def configure(step: mg.Graph, layout: str) -> None:
    if layout == "parallel":
        step.config.enable_data_parallel()
    elif layout.startswith("zero"):
        step.config.enable_zero(stage=STAGES[layout] or 0)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (item for entry in optimizer.state.values() for item in entry.values() if item.dim())


def parts_of(tensors: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    return [local(item) for item in tensors]


def held(tensors: list[torch.Tensor]) -> int:
    return sum({item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in tensors}.values())


def measure(workload: str, layouts: tuple[str, ...]) -> dict[tuple[str, bool], Measured]:
    """On each rank."""
    rank = torch.distributed.get_rank()
    count_from_now_on()
    cases = [(layout, eager) for layout in layouts for eager in (False, True) if not eager or layout in EAGER]
    return {(layout, eager): measured(workload, layout, rank, eager=eager) for layout, eager in cases}


@functools.cache
def on_all(workload: str, ranks: int) -> dict[tuple[str, bool], Measured]:
    """What the first rank sent and holds, which is what all send; the peaks are those of the rank that holds most.

    That is the rank that is ahead in a step: its collectives last until the others begin theirs.
    """
    found = on_ranks(measure, workload, LAYOUTS, ranks=ranks)
    for other in found:
        assert {key: item.sent for key, item in other.items()} == {
            key: item.sent for key, item in found[0].items()
        }
    return {
        key: replace(item, peaks=tuple(map(max, *(other[key].peaks for other in found))))
        for key, item in found[0].items()
    }


def planned(workload: str, layout: str, ranks: int) -> RanksPlan:
    return plan_of(workload, STAGES["parallel" if layout == "ddp" else layout], ranks)


@functools.cache
def plan_of(workload: str, stage: int | None, ranks: int) -> RanksPlan:
    """In this process, which belongs to no group."""
    made = WORKLOADS[workload](smoke=True)
    model = made.make_model()
    step = Step(Trained(model, OPTIMIZERS["adamw"](model.parameters())), made.loss)
    batch = made.make_batch(torch.Generator().manual_seed(0))
    return step.plan(*batch, world_size=ranks, zero=stage)


@functools.cache
def model_bytes(workload: str) -> int:
    return sum(item.nbytes for item in WORKLOADS[workload](smoke=True).make_model().parameters())


@functools.cache
def small_bytes(workload: str) -> int:
    parameters = WORKLOADS[workload](smoke=True).make_model().parameters()
    return sum(item.nbytes for item in parameters if item.numel() < 1024)


CASES = [
    pytest.param(
        workload,
        ranks,
        marks=() if (workload, ranks) == ("mlp", 2) else (pytest.mark.long, pytest.mark.ranks),
    )
    for workload in ("mlp", "gpt", "mobilenet")
    for ranks in (2, 4)
]
every_case = partial(pytest.mark.parametrize, ("workload", "ranks"))(CASES)


@every_case
def test_what_is_sent_is_planned_to_the_byte(workload: str, ranks: int) -> None:
    found = on_all(workload, ranks)
    for layout in LAYOUTS:
        item = found[layout, False]
        assert item.foretold == (len(item.sent), payload(item.sent, ranks)), layout
        if layout != "fully_shard":
            plan = planned(workload, layout, ranks)
            kinds = Counter[str]()
            for sent in plan.ranks[0].sent:
                kinds[sent.collective.removesuffix("_into_tensor").removesuffix("_tensor")] += sent.count
            assert kinds == Counter(name for name, _ in item.sent), layout
            assert {rank.payload_bytes for rank in plan.ranks} == {payload(item.sent, ranks)}, layout


def in_stages(rank: int, zero: int | None = None) -> tuple[Sent, ...]:
    count_from_now_on()
    step = Staged(2, 4, "cpu")
    if (ranks := torch.distributed.get_world_size()) > 2:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "pp"))
        step.config.enable_data_parallel(mesh)
    step.config.enable_zero(zero is not None, stage=zero or 1, shard_min_size=64)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    step(x)
    with counted() as sent:
        step(x)
    return tuple(sent)


def in_stages_here(zero: int | None = None) -> tuple[Sent, ...]:
    return in_stages(torch.distributed.get_rank(), zero)


@pytest.mark.parametrize(
    ("ranks", "zero"), [(2, None), *(pytest.param(4, zero, marks=pytest.mark.long) for zero in (None, 1, 2))]
)
def test_what_stages_send_is_planned_to_the_byte(ranks: int, zero: int | None) -> None:
    step = Staged(2, 4)
    step.config.enable_zero(zero is not None, stage=zero or 1, shard_min_size=64)
    plan = step.plan(step.batch, world_size=ranks, mesh=None if ranks == 2 else (ranks // 2, 2))
    outcomes = on_ranks(in_stages_here, zero, ranks=ranks)
    for rank in plan.ranks:
        found = outcomes[rank.rank]
        messages = [nbytes for name, nbytes in found if name == "send"]
        others = [item for item in found if item[0] != "send"]
        assert rank.payload_bytes == sum(messages) + payload(others, 2)
        assert sum(item.count for item in rank.sent) == len(found)


@every_case
def test_no_more_is_sent_than_has_to_be(workload: str, ranks: int) -> None:
    found, whole = on_all(workload, ranks), model_bytes(workload)
    once = whole * (ranks - 1) / ranks
    for layout in LAYOUTS:
        times = 3 if layout in ("zero3", "fully_shard") else 2
        assert payload(found[layout, False].sent, ranks) <= 1.01 * times * once + 4096, layout


@every_case
def test_there_are_no_more_collectives_than_in_eager_mode(workload: str, ranks: int) -> None:
    found = on_all(workload, ranks)
    eager = len(found["fully_shard", True].sent)
    for layout in ("fully_shard", "zero3"):
        gradients = [name for name, _ in found[layout, False].sent if name != "broadcast"]
        assert len(gradients) <= eager, layout
    assert len(found["ddp", False].sent) <= eager
    if (
        workload != "mobilenet"
    ):  # more and smaller sums than DistributedDataParallel's, so that backward hides them
        assert len(found["ddp", False].sent) <= len(found["ddp", True].sent)


@every_case
def test_ranks_hold_parts(workload: str, ranks: int) -> None:
    found, whole = on_all(workload, ranks), model_bytes(workload)
    for layout, parts in (
        ("ddp", 3.0),
        ("zero1", 1 + 2 / ranks),
        ("zero2", 1 + 2 / ranks),
        ("zero3", 3 / ranks),
    ):
        item = found[layout, False]
        rank = planned(workload, layout, ranks).ranks[0]
        assert item.parameter_bytes == rank.parameter_bytes, layout
        counters = 4 * math.ceil(rank.optimizer_bytes - item.optimizer_bytes) // 4
        assert 0 <= counters <= 4 * 200, layout  # the steps of each parameter
        held_here = item.parameter_bytes + item.optimizer_bytes
        small = (
            small_bytes(workload) if layout != "ddp" else 0
        )  # what has fewer than 1024 elements stays whole
        assert held_here >= parts * whole - 8
        assert held_here <= 1.01 * (parts * (whole - small) + 3 * small), layout


@every_case
def test_the_peak_is_that_of_the_plan(workload: str, ranks: int) -> None:
    """MobileNetV2 may hold less: Gloo has a copy of what is gathered only while a thread does it, soon for small modules."""
    for layout in LAYOUTS:
        item = on_all(workload, ranks)[layout, False]
        wanted = item.planned_peak_bytes
        if layout != "fully_shard":
            wanted = planned(workload, layout, ranks).ranks[0].peak_bytes
        wanted += item.kernel_bytes
        all_bytes = item.parameter_bytes + item.optimizer_bytes + wanted
        gathers_soon = workload == "mobilenet" and layout in ("zero3", "fully_shard")
        least = -0.02 * all_bytes if gathers_soon else 0
        assert any(least <= peak - wanted <= 0.02 * wanted + KERNELS for peak in item.peaks), (
            layout,
            wanted,
            item.peaks,
        )
