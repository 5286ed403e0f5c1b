"""What a step of several processes holds at most: each updates its rows in place, and collectives take a bucket at a time."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.programs.begun import unpacks
from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.runtime.one_piece import most_allocated
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same

WIDTH = 256


def _model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers)


class Step(mg.Graph):
    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        self.average = self.add_ema(model, 0.9)
        self.config.backend("aten")
        self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def trained_beside_eager(rank: int, step: Step, *, rows: int) -> DistributedDataParallel:
    """What eager mode makes of the same model in three steps, whose losses are the same."""
    eager = DistributedDataParallel(copy.deepcopy(step.model))
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for index in range(3):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2 * index + rank))
        loss = eager(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(loss.detach(), step(x).detach(), f"loss {index}")
    return eager


def rows_are_updated_in_place(rank: int, stage: int) -> None:
    """A step holds most when it gathers what all have updated: that, and the rows that it has updated itself."""
    base = _model()
    step = Step(base, stage)
    eager = trained_beside_eager(rank, step, rows=4)
    for (name, parameter), ours in zip(eager.module.named_parameters(), base.parameters(), strict=True):
        assert_same(parameter.detach(), ours.detach(), name)
    (build,) = step.builds
    whole = sum(item.nbytes for item in base.parameters())
    copied_by_group = sum(holder.nbytes for holder in build.memory.holders if holder.kind == "inside")
    assert copied_by_group == 6 * WIDTH * WIDTH * 4  # new weights come in one piece first
    assert build.memory.peak_bytes - copied_by_group < 1.6 * whole, build.memory.peak_bytes / whole


def collectives_are_awaited_as_they_begin(rank: int) -> None:
    """So that the first updates run while the last gradients are on their way."""
    step = Step(_model(), 2)
    step(torch.randn(4, WIDTH))
    (build,) = step.builds
    nodes = list(build.program.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    begun = [awaited_by(node) for node in nodes if awaited_by(node) is not None]
    assert len(begun) == sum(map(begins_collective, nodes)) > 2
    assert all(place[one] < place[other] for one, other in pairwise(begun))


def steps_hold_what_is_planned(rank: int, stage: int, backend: str) -> None:
    """By torch's allocator, with the copies of the process group, which a thread frees when it has sent them: sooner or later."""
    step = Step(_model(), stage)
    step.config.backend(backend)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        step(x)
    (build,) = step.builds
    assert build.backend == backend, build.notes
    nodes = [moment.node for moment in build.memory.timeline]
    before_first_wait = nodes[: next(place for place, node in enumerate(nodes) if node.startswith("wait"))]
    assert len({node for node in before_first_wait if node.startswith("all_gather")}) <= 2, nodes
    runs = [most_allocated(lambda: step(x), everywhere=True) or 0 for _ in range(10)]
    planned = build.memory.peak_bytes
    assert any(most == pytest.approx(planned, rel=0.02) for most in runs), (
        planned,
        runs,
        build.memory.holders,
    )


def what_runs_again_reads_what_was_gathered_again(rank: int) -> None:
    """Not what was gathered for forward, which then would be held beside it."""
    layers = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(5)
    ]
    base = nn.Sequential(*layers)
    step = Step(base, 3)
    step.config.enable_zero(stage=3, shard_min_size=0)
    trained_beside_eager(rank, step, rows=2048)
    (build,) = step.builds
    nodes = [*build.program.graph.nodes]
    place = {node: index for index, node in enumerate(nodes)}
    again = {source for node in nodes if "_again" in node.name for source in node.all_input_nodes}
    sent: dict[frozenset[str], list[fx.Node]] = {}
    for node in filter(begins_collective, nodes):
        if "all_gather" in node.name:
            sent.setdefault(frozenset(_parameters_of(node)), []).append(node)
    twice = [pair for pair in sent.values() if len(pair) == 2]
    assert len(twice) >= 2, sent
    read = 0
    for first, second in twice:
        (wait,) = (node for node in second.users if awaited_by(node))
        assert max(place[node] for node in _shown_by(first)) < place[wait], first
        read += not again.isdisjoint(_shown_by(second))
    assert read >= 2, "nothing runs again that reads parameters"


def _parameters_of(node: fx.Node) -> set[str]:
    if node.op == "placeholder":
        return {node.name}
    return set[str]().union(*map(_parameters_of, node.all_input_nodes))


def _shown_by(gather: fx.Node) -> set[fx.Node]:
    """What shows the memory of a gather, with what reads that."""
    found, pending = set[fx.Node](), [gather]
    while pending:
        node = pending.pop()
        readers = set(node.users) - found
        found |= readers
        pending += [reader for reader in readers if awaited_by(reader) or unpacks(reader)]
    return found


QUICK: dict[str, Case] = {
    f"stage {stage}": partial(rows_are_updated_in_place, stage=stage) for stage in (1, 2)
}
QUICK |= {
    f"single ops, stage {stage}": partial(steps_hold_what_is_planned, stage=stage, backend="aten")
    for stage in (1, 2, 3)
}
QUICK["gathered again"] = what_runs_again_reads_what_was_gathered_again
QUICK["order"] = collectives_are_awaited_as_they_begin


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_memory(quick: Wrong, case: str) -> None:
    assert_right(case, quick)


LONG: dict[str, Case] = {
    f"compiled, stage {stage}": partial(steps_hold_what_is_planned, stage=stage, backend="inductor")
    for stage in (2, 3)
}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", LONG)
def test_memory_of_compiled_steps(long: Wrong, case: str) -> None:
    assert_right(case, long)
