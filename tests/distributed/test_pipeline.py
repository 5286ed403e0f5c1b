"""Stages of a model on several ranks: bit for bit what one process computes that takes the same micro-batches."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import monograph as mg
from tests.distributed.processes import Group, on_ranks
from tests.distributed.staged import IMAGES, MICRO_BATCHES, Eager, Extras, Step, compare, frozen, tied
from tests.distributed.training import Case, Wrong, assert_right, num_unawaited
from tests.support import assert_same

EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))

SCALED = Extras(scaled=True, infinite_in=(1, 2))


def _two_stages(schedule: str, optimizer: str, extras: Extras | None = None) -> Case:
    return lambda rank: _no_more(compare(tied(2), optimizer, schedule, rank, extras))


def _four_stages(schedule: str, optimizer: str = "adamw", extras: Extras | None = None) -> Case:
    return lambda rank: _no_more(compare(tied(4), optimizer, schedule, rank, extras))


def _no_more(step: Step) -> None:
    """Nothing is left that somebody has begun and nobody waits for."""
    assert num_unawaited() == 0


def _refused(
    stages: Sequence[tuple[str, int]],
    said: str,
    configure: Callable[[mg.Graph], None],
    placed: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """The same error on each rank, and nothing is changed."""

    def case(rank: int) -> None:
        task = replace(tied(2), stages=tuple(stages))
        torch.manual_seed(0)
        model = task.make()
        optimizer = torch.optim.AdamW(model.parameters())
        step = Step(task, model, optimizer, "1F1B", Extras(placed=placed))
        configure(step)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(mg.DistributedError) as found:
            step(*task.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
        assert said in str(found.value), found.value
        assert_same(before, model.state_dict(), "state")
        assert not optimizer.state
        assert not step.builds

    return case


def _nothing(_graph: mg.Graph) -> None:
    pass


def _differing(graph: mg.Graph) -> None:
    graph.config.set_pipeline_schedule("1F1B" if dist.get_rank() else "GPipe")


def _one_cannot_build(rank: int) -> None:
    """The other one hears of it while it waits to begin; both may try again."""
    task = tied(2)
    torch.manual_seed(0)
    model = task.make()
    step = Step(task, model, torch.optim.SGD(model.parameters()), "1F1B", Extras())
    batch = (*task.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
    step.config.set_gradient_accumulation_steps(1 if rank else MICRO_BATCHES)
    said = (
        "there are no micro-batches"
        if rank
        else "rank 1 could not build its step: DistributedError: modules have"
    )
    with pytest.raises(mg.DistributedError, match=said):
        step(*batch)
    dist.barrier()  # else the first call of a slow rank meets the second one of the other, and hears of nothing
    step.config.set_gradient_accumulation_steps(MICRO_BATCHES)
    step(*batch)


def _resumed(rank: int) -> None:
    """A rank saves what it updates, another graph goes on from there, and one process alone says what is missing."""
    task, extras = tied(2), replace(EVERY, infinite_in=None)
    generator = torch.Generator().manual_seed(3)
    batches = [(*task.batch(generator), torch.ones(MICRO_BATCHES)) for _ in range(4)]

    def made() -> Step:
        torch.manual_seed(0)
        model = task.make()
        return Step(task, model, torch.optim.AdamW(model.parameters(), lr=0.05), "1F1B", extras)

    step, other = made(), made()
    for batch in batches[:2]:
        step(*batch)
    state = copy.deepcopy(step.state_dict())
    own, others = (
        ("layers.0.", ("layers.1.", "norm.")) if rank == 0 else ("layers.1.", ("layers.0.", "embedding."))
    )
    assert any(key.startswith(own) for key in state["model"])
    assert not any(key.startswith(others) for key in state["model"])
    assert not any(key.startswith(tuple(f"module.{name}" for name in others)) for key in state["ema.model"])
    assert len(state["optimizer.0"]["state"]) == len(state["model"])
    other.load_state_dict(state)
    for batch in batches[2:]:
        assert_same(step(*batch)["loss"].detach(), other(*batch)["loss"].detach(), "loss")
    assert_same(step.state_dict()["model"], other.state_dict()["model"], "model")
    assert len(other.builds) == 1
    model = task.make()
    alone = Step(replace(task, stages=()), model, torch.optim.AdamW(model.parameters()), "1F1B", extras)
    with pytest.raises(mg.CheckpointError, match="missing"):
        alone.load_state_dict(state)


def _not_finite(rank: int) -> None:
    """A number of one rank lets all keep their state; the rank that has it says where it comes from."""
    task, extras = tied(2), Extras(infinite_at="norm.bias")
    torch.manual_seed(0)
    model = task.make()
    step = Step(task, model, torch.optim.SGD(model.parameters()), "1F1B", extras)
    step.config.detect_nonfinite()
    batch = task.batch(torch.Generator())
    step(*batch, torch.ones(MICRO_BATCHES))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mg.NonfiniteError) as found:
        step(*batch, torch.tensor([1.0, 1.0, torch.inf, 1.0]))
    assert ("norm.bias" if rank else "not finite") in found.value.hint
    assert_same(before, model.state_dict(), "state")
    step(*batch, torch.ones(MICRO_BATCHES))


def _compiled(_rank: int) -> None:
    """Parts of each micro-batch are compiled: near the numbers of ops, with the same messages between ranks."""
    task = tied(2)
    torch.manual_seed(0)
    model = task.make()
    eager = copy.deepcopy(model)
    reference = Eager(eager, torch.optim.AdamW(eager.parameters()), Extras(clip=0.3))
    extras = Extras(clip=0.3, backend="inductor")
    step = Step(task, model, torch.optim.AdamW(model.parameters()), "1F1B", extras)
    for seed in range(3):
        batch = (*task.batch(torch.Generator().manual_seed(seed)), torch.ones(MICRO_BATCHES))
        expected, found = reference(*batch), step(*batch)
        torch.testing.assert_close(found["loss"].detach(), expected["loss"])
        torch.testing.assert_close(found["norm"], expected["norm"])
    assert step.builds[0].backend == "inductor"
    assert "2 parts of the pipeline compiled" in step.explain()


TWO = tied(2).stages
BACKWARD = (("embedding", 1), ("layers.0", 0), ("layers.1", 1), ("norm", 1))
QUICK: dict[str, Case] = {
    "1f1b sgd": _two_stages("1F1B", "sgd"),
    "1f1b adamw, everything": _two_stages("1F1B", "adamw", EVERY),
    "1f1b foreach, everything": _two_stages("1F1B", "foreach", EVERY),
    "infinite in the first stage": _two_stages(
        "1F1B", "sgd", replace(EVERY, infinite_at="layers.0.0.weight")
    ),
    "placed": lambda rank: _no_more(
        compare(tied(2), "sgd", "1F1B", 1 - rank, replace(EVERY, placed=((1,), (0,))))
    ),
    "placed on two": _refused(
        TWO, "of stage 0 is placed on the ranks [0, 1], of which [0, 1] is in", _nothing, ((0, 1), (1,))
    ),
    "two placed on one": _refused(
        TWO, "stage 1 is placed on the process of stage 0, and 1F1B runs them on two", _nothing, ((1,), (1,))
    ),
    "frozen last stage": lambda rank: _no_more(compare(frozen(1), "sgd", "1F1B", rank, SCALED, steps=5)),
    "images": lambda rank: _no_more(compare(IMAGES, "sgd", "1F1B", rank)),
    "on meta": _two_stages("1F1B", "adamw", Extras(clip=0.3, on_meta=True)),
    "zero bubble v": _four_stages("ZBVZeroBubble"),
    "dual pipe v": _four_stages("DualPipeV", extras=EVERY),
    "against the flow": _refused(
        BACKWARD, "module model.layers.0.0 is in stage 0, and reads what module model.embedding", _nothing
    ),
    "too many stages": _refused(
        (*TWO[:2], ("layers.1", 2), ("norm", 1)), "3 stages cannot be spread", _nothing
    ),
    "a gap": _refused((*TWO[:2], ("layers.1", 2), ("norm", 2)), "no module is in stage 1", _nothing),
    "no stage": _refused(TWO[:-1], "module model.norm has parameters and no stage", _nothing),
    "one stage too few": _refused(
        TWO, "takes two stages for each rank", lambda graph: graph.config.set_pipeline_schedule("DualPipeV")
    ),
    "no micro-batches": _refused(
        TWO, "there are no micro-batches", lambda graph: graph.config.set_gradient_accumulation_steps(1)
    ),
    "zero": _refused(TWO, "enable_zero() is on", lambda graph: graph.config.enable_zero(stage=1)),
    "one cannot build": _one_cannot_build,
    "resumed": _resumed,
    "not finite": _not_finite,
    "other schedules": _refused(TWO, "differs from the others: it has ", _differing),
}
LONG: dict[str, Case] = {
    "gpipe sgd": _two_stages("GPipe", "sgd"),
    "gpipe sgd, everything": _two_stages("GPipe", "sgd", EVERY),
    "1f1b fused": _two_stages("1F1B", "fused", Extras(clip=0.3)),
    "a branch that all take": lambda rank: _no_more(
        compare(tied(2), "radam", "1F1B", rank, steps=7, builds=2)
    ),
    "infinite in the last stage": _two_stages("GPipe", "adamw", replace(EVERY, infinite_at="norm.bias")),
    "autocast": _two_stages("1F1B", "sgd", Extras(autocast=True)),
    "checkpointed": _two_stages("GPipe", "sgd", Extras(checkpointed=True)),
    "interleaved": _four_stages("Interleaved1F1B"),
    "breadth first": _four_stages("LoopedBFS"),
    "zero bubble": _four_stages("InterleavedZeroBubble"),
    "compiled exactly": _two_stages("1F1B", "adamw", Extras(clip=0.3, backend="exact")),
    "compiled": _compiled,
}
FOUR: dict[str, Case] = {
    "1f1b, everything": _four_stages("1F1B", extras=EVERY),
    "interleaved": lambda rank: _no_more(compare(tied(8), "sgd", "Interleaved1F1B", rank)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_a_pipeline_equals_one_process_or_is_refused(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_a_pipeline_equals_one_process(case: str, long: Wrong) -> None:
    assert_right(case, long)


def _saved(directory: str) -> Any:
    task = tied(2)
    torch.manual_seed(0)
    model = task.make()
    step = Step(task, model, torch.optim.AdamW(model.parameters()), "1F1B", EVERY)
    for _ in range(3):
        step(*task.batch(torch.Generator()), torch.ones(MICRO_BATCHES))
    state = step.state_dict()
    mg.save(state, directory)
    return {"model": state["model"], "state": state["optimizer.0"]["state"]}


def test_one_process_loads_what_all_ranks_have_saved(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    first, second = on_ranks(_saved, directory)
    loaded = mg.load(directory)
    assert_same({**first["model"], **second["model"]}, dict(loaded["model"]), "model")
    assert not first["state"].keys() & second["state"].keys()
    assert_same({**first["state"], **second["state"]}, dict(loaded["optimizer.0"]["state"]), "state")
    task = replace(tied(2), stages=())
    model = task.make()
    alone = Step(task, model, torch.optim.AdamW(model.parameters()), "1F1B", EVERY)
    alone.load_state_dict(loaded)
    alone(*task.batch(torch.Generator()), torch.ones(MICRO_BATCHES))


def _until_one_is_killed() -> None:
    task = tied(2)
    model = task.make()
    step = Step(task, model, torch.optim.SGD(model.parameters()), "1F1B", Extras())
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*task.batch(torch.Generator()), torch.ones(MICRO_BATCHES))


def test_a_rank_that_is_killed_is_named() -> None:
    survivor, killed = Group(_until_one_is_killed, 2, seconds=8.0).results()
    assert not killed.is_alive
    assert isinstance(survivor.error, mg.DistributedError)
    assert "rank 1 is gone or stopped: rank 1 was last in step 1" in survivor.error.message


@pytest.mark.long
def test_on_four_ranks(four: Wrong) -> None:
    for case in FOUR:
        assert_right(case, four)
