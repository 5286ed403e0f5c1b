"""Copies of a pipeline, each with a batch of its own: bit for bit `DistributedDataParallel` of the whole model."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.ir.meta import form
from monograph.ir.port import Role
from tests.distributed.processes import on_ranks
from tests.distributed.staged import IMAGES, MICRO_BATCHES, Extras, Step, Task, compare, frozen, tied, whole
from tests.distributed.training import Case, Wrong, assert_right, num_unawaited, run_cases
from tests.support import assert_same

EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))


@cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def _copies(task: Task, schedule: str, optimizer: str, extras: Extras | None = None) -> Case:
    def case(_rank: int) -> None:
        compare(task, optimizer, schedule, _mesh().get_local_rank("pp"), extras, mesh=_mesh())
        assert num_unawaited() == 0

    return case


def _no_more(_step: Step) -> None:
    assert num_unawaited() == 0


def _step(extras: Extras, mesh: Any = None, zero: int | None = None) -> Step:
    torch.manual_seed(0)
    model = tied(2).make()
    step = Step(tied(2), model, torch.optim.AdamW(model.parameters(), lr=0.05), "1F1B", extras)
    step.config.enable_data_parallel(_mesh() if mesh is None else mesh)
    step.config.enable_zero(zero is not None, stage=zero or 2, shard_min_size=0)
    return step


def _batch(seed: int = 0, rows: int = 2 * MICRO_BATCHES) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10 * seed + _mesh().get_local_rank("dp"))
    words = [torch.randint(11, (rows, 3), generator=generator) for _ in range(2)]
    return (*words, torch.ones(MICRO_BATCHES))


def _resumed(_rank: int) -> None:
    """Another graph goes on bit for bit from a checkpoint of all ranks."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    extras = replace(EVERY, infinite_in=None)
    step, other = _step(extras, zero=2), _step(extras, zero=2)
    for seed in range(2):
        step(*_batch(seed))
    mg.save(step.state_dict(), f"{directory[0]}/checkpoint")
    for parameter in other.model.parameters():
        parameter.data.zero_()
    other.load_state_dict(mg.load(f"{directory[0]}/checkpoint"))
    for seed in (2, 3):
        assert_same(step(*_batch(seed))["loss"].detach(), other(*_batch(seed))["loss"].detach(), "loss")
    for one, two in zip(*(list(item.state_dict()["model"].items()) for item in (step, other)), strict=True):
        assert_same(one, two, "model")
    assert len(other.builds) == 1
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory[0])


def _not_finite(_rank: int) -> None:
    """A number in one stage of one copy lets all keep their state."""
    extras = Extras(infinite_at="norm.bias")
    step = _step(extras)
    step.config.detect_nonfinite()
    step(*_batch())
    before = copy.deepcopy(step.model.state_dict())
    factor = torch.ones(MICRO_BATCHES)
    if _mesh().get_local_rank("dp") == 1:
        factor[2] = torch.inf
    with pytest.raises(mg.NonfiniteError):
        step(*_batch(1)[:2], factor)
    assert_same(before, step.model.state_dict(), "state")
    step(*_batch(2))


def _holds(_rank: int) -> None:
    """State of the own stage alone, in rows: two moments of half of each parameter."""
    step = _step(Extras(), zero=1)
    step(*_batch())
    program = step.builds[0].program
    nodes = dict(zip(program.inputs, program.graph.find_nodes(op="placeholder"), strict=True))
    held = {
        role: sum(form(node).nbytes for port, node in nodes.items() if port.role is role)
        for role in (Role.PARAM, Role.OPTIM)
    }
    steps = 4 * sum(port.path.endswith("/step") for port in nodes)
    assert held[Role.PARAM] < 4 * sum(item.numel() for item in step.model.parameters())
    assert held[Role.OPTIM] - steps == pytest.approx(held[Role.PARAM], rel=0.2)  # the embedding has 11 rows


def _refused(
    said: str, make: Callable[[], Step], rows: Callable[[], int] = lambda: 2 * MICRO_BATCHES
) -> Case:
    def case(_rank: int) -> None:
        step = make()
        before = copy.deepcopy(step.model.state_dict())
        with pytest.raises(mg.DistributedError) as found:
            step(*_batch(rows=rows()))
        assert said in str(found.value), found.value
        assert_same(before, step.model.state_dict(), "state")

    return case


def _wrapped() -> Step:
    torch.manual_seed(0)
    model = DistributedDataParallel(tied(2).make())
    task = replace(tied(2), stages=tuple((f"module.{path}", stage) for path, stage in tied(2).stages))
    return Step(task, model, torch.optim.AdamW(model.parameters()), "1F1B", Extras())


def _three_dimensions(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    with pytest.raises(
        mg.ConfigError, match="a mesh of the dimensions pp, dp, tp: a pipeline has stages and copies"
    ):
        _step(Extras(), mesh)


def _in_parts() -> Step:
    step = _step(Extras())
    parallelize_module(step.model.layers[0].to(nn.Module), _mesh()["dp"], {"0": ColwiseParallel()})
    return step


def _without_stages() -> Step:
    step = _step(Extras())
    for path, _ in tied(2).stages:
        part: Any = step.model
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        part.to(mg.GraphModule).set_stage(None)
    return step


FOUR: dict[str, Case] = {
    "1f1b adamw, everything": _copies(tied(2), "1F1B", "adamw", EVERY),
    "zero 2": _copies(tied(2), "1F1B", "adamw", replace(EVERY, zero=2)),
    "not finite": _not_finite,
    "holds": _holds,
    "one dimension": _refused("nobody has said which", lambda: _step(Extras(), _mesh()["dp"])),
    "zero 3": _refused("enable_zero(stage=3) is on", lambda: _step(Extras(), zero=3)),
    "no stages": _refused("no module has a stage", _without_stages),
    "three dimensions": _three_dimensions,
    "in parts": _refused("model.layers.0.0 has parameters that are DTensors", _in_parts),
    "wrapped": _refused("DistributedDataParallel wraps model", _wrapped),
    "other sizes": _refused(
        "the argument x: i64[16, 3], and elsewhere",
        lambda: _step(Extras()),
        lambda: 2 * MICRO_BATCHES * (1 + _mesh().get_local_rank("dp")),
    ),
}
MORE: dict[str, Case] = {
    "1f1b sgd": _copies(tied(2), "1F1B", "sgd"),
    "gpipe foreach, everything": _copies(tied(2), "GPipe", "foreach", EVERY),
    "zero bubble v, everything": _copies(tied(4), "ZBVZeroBubble", "adamw", EVERY),
    "images": _copies(IMAGES, "1F1B", "sgd"),
    "on meta": _copies(tied(2), "1F1B", "adamw", Extras(clip=0.3, on_meta=True)),
    "zero 1": _copies(tied(2), "1F1B", "adamw", replace(EVERY, zero=1)),
    "zero 2, sgd": _copies(IMAGES, "1F1B", "sgd", Extras(zero=2)),
    "frozen last stage": _copies(frozen(1), "1F1B", "sgd", Extras(scaled=True, infinite_in=(1, 2))),
    "frozen first stage, zero 2": _copies(
        frozen(0), "1F1B", "adamw", Extras(scaled=True, infinite_in=(1, 2), zero=2)
    ),
    "placed": lambda _rank: _no_more(
        compare(
            tied(2),
            "sgd",
            "1F1B",
            1 - _mesh().get_local_rank("pp"),
            Extras(clip=0.3, placed=((1, 3), (0, 2))),
            mesh=_mesh(),
        )
    ),
    "resumed": _resumed,
}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", FOUR)
def test_copies_of_a_pipeline_equal_copies_of_the_model(case: str, four: Wrong) -> None:
    assert_right(case, four)


@pytest.mark.long
def test_more_copies_of_pipelines() -> None:
    found = on_ranks(run_cases, __name__, "MORE", ranks=4)
    for case in MORE:
        assert_right(case, found)


def _deviating(kind: str) -> str:
    """What a rank hears if one has another mesh, or a copy another batch from the third step on."""
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mesh = (
        {"names": other, "dimensions": _mesh()["dp"]}.get(kind, _mesh()) if dist.get_rank() == 3 else _mesh()
    )
    step = _step(Extras(), mesh)
    before = copy.deepcopy(step.model.state_dict())
    if kind == "rows":
        step(*_batch())
        step(*_batch(1))
        before = copy.deepcopy(step.model.state_dict())
    rows = 2 * MICRO_BATCHES * (1 + _mesh().get_local_rank("dp")) if kind == "rows" else 2 * MICRO_BATCHES
    with pytest.raises(mg.DistributedError) as found:
        step(*_batch(2, rows=rows))
    assert_same(before, step.model.state_dict(), "state")
    return found.value.message


@pytest.mark.long
def test_a_rank_that_deviates_is_named_at_once() -> None:
    for kind, said in (
        ("names", "rank 3 differs from the others: it has a mesh of the dimensions pp, dp and the ranks"),
        (
            "dimensions",
            "rank 3 could not build its step: DistributedError: modules have stages, and enable_data",
        ),
        ("rows", "already and runs the collectives of an earlier step, while rank "),
    ):
        messages = on_ranks(_deviating, kind, ranks=4)
        rest = messages[:3] if kind == "dimensions" else messages
        assert all(said in message for message in rest), messages


def _saved(directory: str) -> Any:
    step = _step(Extras(averaged=True), zero=2)
    for seed in range(2):
        step(*_batch(seed))
    mg.save(step.state_dict(), directory)
    entries = step.state_dict()["optimizer.0"]["state"]
    return {key: {name: whole(item) for name, item in entry.items()} for key, entry in entries.items()}


@pytest.mark.long
def test_one_process_loads_what_all_copies_have_saved(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    found = on_ranks(_saved, directory, ranks=4)
    loaded = mg.load(directory)
    assert set(loaded["model"]) == set(tied(2).make().state_dict())
    assert_same(found[0] | found[1], dict(loaded["optimizer.0"]["state"]), "state")
    assert_same(found[2] | found[3], found[0] | found[1], "copies")
    model = tied(2).make()
    task = replace(tied(2), stages=())
    alone = Step(task, model, torch.optim.AdamW(model.parameters()), "1F1B", Extras(averaged=True))
    alone.load_state_dict(loaded)
    generator = torch.Generator()
    alone(*task.batch(generator), torch.ones(MICRO_BATCHES))
