"""A step of a pipeline in eager mode is that of the graph on each rank, and `verify()` finds a step that is not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import monograph as mg
from monograph.distributed.pipeline.rank import _Step
from monograph.internals.internals import internals_of
from tests.distributed import test_pipeline_random as random_stages
from tests.distributed.staged import IMAGES, MICRO_BATCHES, OPTIMIZERS, Extras, Step, Task, stages_of, tied
from tests.distributed.training import Case, Wrong, assert_right, local
from tests.support import assert_same

TIED, PLAIN = tied(2), Extras()
EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))


@cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def _made(
    task: Task, optimizer: str, schedule: str, extras: Extras, mine: set[int], *, copies: bool = False
) -> Step:
    torch.manual_seed(0)
    model = task.make()
    for path, stage in task.stages:
        if extras.on_meta and stage not in mine:
            model.get_submodule(path).to("meta")
    step = Step(task, model, OPTIMIZERS[optimizer](model.parameters()), schedule, extras)
    if copies:
        step.config.enable_data_parallel(_mesh())
    if extras.zero:
        step.config.enable_zero(stage=extras.zero, shard_min_size=0)
    return step


def _values(step: Step) -> dict[str, Any]:
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
    return internals_of(step).owned()


def alike(
    rank: int,
    *,
    task: Task = TIED,
    optimizer: str = "adamw",
    schedule: str = "1F1B",
    extras: Extras = PLAIN,
    copies: bool = False,
) -> None:
    """Steps of the graph and in eager mode: the same results and state; `verify()` agrees and changes nothing."""
    place = _mesh().get_local_rank("dp") if copies else 0
    stages = stages_of(_mesh().get_local_rank("pp") if copies else rank, 2, task.num_stages, schedule)
    ours, other = (_made(task, optimizer, schedule, extras, stages, copies=copies) for _ in range(2))
    generator = torch.Generator().manual_seed(7 + place)
    for index in range(3):
        factor = torch.ones(MICRO_BATCHES)
        if place == 0 and extras.infinite_in is not None and extras.infinite_in[0] == index:
            factor[extras.infinite_in[1]] = torch.inf
        batch = (*task.batch(generator), factor)
        for step in [other] * (index == 1) + [ours] * (index == 2):
            before = _values(step)
            report = step.verify(*batch, steps=index)
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


def own_state_alone(rank: int) -> None:
    """No rank keeps what optimizers have for parameters of others."""
    step = _made(TIED, "adamw", "1F1B", PLAIN, {rank})
    batch = (*TIED.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
    for run in (step.eager, step):
        run(*batch)
        entries = _owned(step).optimizers[0].optimizer.state
        mine = [path for path, stage in TIED.stages if stage == rank]
        own = {id(p) for path in mine for p in step.model.to(nn.Module).get_submodule(path).parameters()}
        assert {id(owner) for owner in entries} == own


def drawing(rank: int) -> None:
    """Each stage draws by the generator of its rank, and these go on as after a step of the graph."""
    ours, other = (random_stages.Step(random_stages.model()) for _ in range(2))
    batches = random_stages.batches()
    states = [torch.manual_seed(100 + rank).get_state()] * 2
    for x in batches[:3]:
        found = []
        for index, run in enumerate((ours, other.eager)):
            torch.set_rng_state(states[index])
            found.append(run(x).detach())
            states[index] = torch.get_rng_state()
        assert_same(*found, "loss")
        assert_same(*states, "generator")
    assert_same(random_stages.own(ours.model, rank), random_stages.own(other.model, rank), "model")
    before = torch.get_rng_state()
    report = ours.verify(batches[3])
    assert report.ok, report
    assert_same(before, torch.get_rng_state(), "generator")


def drawing_in_two_stages(rank: int) -> None:
    """A rank draws for the second micro-batch of a stage before it draws in its other stage: one process cannot do so."""
    step = random_stages.Step(random_stages.model(4), "Interleaved1F1B", 4)
    (x, *_) = random_stages.batches()
    for look in (step.eager, step.verify):
        with pytest.raises(mg.DistributedError, match=r"rank 0 draws in the stages 0, 2"):
            look(x)
    step(x)


def alone(rank: int) -> None:
    """The others are named to the rank that looks at a step alone."""
    step = _made(TIED, "sgd", "1F1B", PLAIN, {rank})
    batch = (*TIED.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
    step(*batch)
    if rank == 0:
        with pytest.raises(
            mg.DistributedError, match=r"graph.eager\(\) waits for all ranks: rank 1 called verify"
        ):
            step.eager(*batch)
    else:
        with pytest.raises(
            mg.DistributedError, match=r"graph.verify\(\) waits for all ranks: rank 0 called eager"
        ):
            step.verify(*batch)


def wrong(rank: int, backend: str = "aten") -> None:
    """A capture in which each micro-batch is the first one is found, whatever runs it."""
    step = _made(TIED, "adamw", "1F1B", Extras(backend=backend), {rank})
    batch = (*TIED.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
    with pytest.MonkeyPatch.context() as patch:
        rows = _Step._rows
        patch.setattr(_Step, "_rows", lambda step, port, _micro_batch: rows(step, port, 0))
        report = step.verify(*batch)
    assert not report.ok
    assert report.ranks == (0, 1)
    assert report.first is not None
    assert report.first.cause == "capture", report
    right = _made(TIED, "adamw", "1F1B", Extras(backend=backend), {rank}).verify(*batch)
    assert right.ok, right


class Times(nn.Module):
    """Multiplies by a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.full((6,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def plain_tensors_on_meta(rank: int) -> None:
    def model() -> nn.Module:
        made = TIED.make()
        for layer in made.layers:
            layer.append(Times())
        made.layers[1 - rank][-1].by = made.layers[1 - rank][-1].by.to("meta")
        return made

    alike(rank, task=replace(TIED, make=model), extras=Extras(on_meta=True))


def drawing_by_an_argument(rank: int) -> None:
    """A generator of the user's is moved by the rank of the stage that draws: no process can say where others have it."""
    step = Noisy(random_stages.model())
    generator = torch.Generator().manual_seed(3)
    (x, *_) = random_stages.batches()
    with pytest.raises(
        mg.DistributedError, match=r"each rank moves its torch.Generator by the draws of its own stages"
    ):
        step.eager(x, generator)


class Noisy(random_stages.Step):
    def build(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        hidden = self.model.eval()(x)
        loss = (hidden * torch.rand(hidden.shape, generator=generator)).square().mean()
        loss.backward()
        return loss


QUICK: dict[str, Case] = {
    "adamw, everything": partial(alike, extras=EVERY),
    "on meta": partial(alike, extras=Extras(clip=0.3, averaged=True, on_meta=True)),
    "own state alone": own_state_alone,
    "drawing": drawing,
    "drawing in two stages": drawing_in_two_stages,
    "plain tensors on meta": plain_tensors_on_meta,
    "drawing by an argument": drawing_by_an_argument,
    "alone": alone,
    "wrong": wrong,
}
LONG: dict[str, Case] = {
    "wrong, compiled": partial(wrong, backend="inductor"),
    "images": partial(alike, task=IMAGES, optimizer="sgd"),
    "foreach, v": partial(alike, task=tied(4), optimizer="foreach", schedule="ZBVZeroBubble", extras=EVERY),
    "fused, interleaved": partial(alike, task=tied(4), optimizer="fused", schedule="Interleaved1F1B"),
}
FOUR: dict[str, Case] = {
    "copies": partial(alike, copies=True, extras=EVERY),
    "copies, zero 1": partial(alike, copies=True, extras=replace(EVERY, zero=1)),
    "copies, zero 2": partial(alike, copies=True, extras=replace(EVERY, zero=2)),
}


@pytest.mark.long
@pytest.mark.ranks
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
