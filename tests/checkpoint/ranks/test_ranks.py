"""A checkpoint of several processes: written together or not at all, and loaded by as many as one likes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import monograph as mg
from tests.checkpoint.ranks.states import WHOLE, expected, rank_state, spread, whole
from tests.checkpoint.same import assert_equal, difference
from tests.checkpoint.test_damage import seal
from tests.distributed.processes import on_ranks
from tests.support.warm import run_script

OTHER = {"weight": Shard(1), "narrow": Replicate(), "bias": Shard(0)}


def refusal(function: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """The message and the hint of a CheckpointError."""
    try:
        function(*arguments, **options)
    except mg.CheckpointError as error:
        return error.message, error.hint
    return "", ""


def saving(folder: Path) -> dict[str, Any]:
    """Everything that two ranks save, and load again."""
    rank, path = dist.get_rank(), folder / "checkpoint"
    found: dict[str, Any] = {"path": mg.save(rank_state(), path)}
    found["own"] = difference(expected(rank), mg.load(path))
    like = {"model": {name: spread(name, placement) for name, placement in OTHER.items()}}
    loaded = mg.load(path, like=like)
    found["placements"] = {name: loaded["model"][name].placements[0] for name in OTHER}
    found["tied"] = loaded["model"]["again"] is loaded["model"]["weight"]
    found["other placement"] = difference(expected(rank), whole(dict(loaded)))

    found["there"] = refusal(mg.save, rank_state(1), path)
    found["unchanged"] = mg.load(path)["step"]
    found["archive"] = refusal(mg.save, rank_state(1), folder / "one.zip")
    found["wrong"] = refusal(mg.save, rank_state(1) | ({"f": len} if rank else {}), path, overwrite=True)
    found["unequal"] = refusal(
        mg.save, {"weight": WHOLE["weight"] if rank else spread("weight", Shard(0))}, folder / "unequal"
    )
    found["twice"] = refusal(
        mg.save, {"w": spread("weight", Shard(0)), "w[0:4,0:3]": torch.ones(1)}, folder / "twice"
    )
    found["still"] = mg.load(path)["step"]

    plain = os.write
    if rank == 1:
        os.write = lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        found["full"] = refusal(mg.save, rank_state(1), folder / "full")
        found["full over it"] = refusal(mg.save, rank_state(1), path, overwrite=True)
    finally:
        os.write = plain
    found["after full"] = difference(expected(rank), mg.load(path))
    mg.save(rank_state(2), path, overwrite=True)
    found["over it"] = difference(expected(rank, 2), mg.load(path))
    dist.barrier()
    mg.save(rank_state(), folder / "two")
    if rank == 0:
        mg.save({"step": 3}, folder / "alone", together=False)
    dcp.save({"model": rank_state()["model"]}, checkpoint_id=folder / "of torch")
    theirs = {"weight": spread("weight", Shard(1)), "scalar": torch.zeros(())}
    dcp.load({"model": theirs}, checkpoint_id=folder / "of torch")
    found["of torch"] = difference({name: WHOLE[name] for name in theirs}, whole(theirs))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(saving, folder)


@pytest.fixture
def path(folder: Path, saved: object, tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    return Path(shutil.copytree(folder / "two", tmp_path / "two"))


def test_a_process_by_itself_imports_nothing_for_many(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch\nimport monograph as mg\n"
        "manager = mg.CheckpointManager('steps')\n"
        "manager.save({'x': torch.ones(2)}, step=1)\n"
        "mg.load(mg.save({'x': torch.ones(2)}, 'checkpoint'))\n"
        "mg.load(manager.latest())\n"
        "print([name for name in sys.modules if name in ('torch.distributed.checkpoint', 'monograph.distributed.agreement')])\n"
    )
    done = run_script([script.name], cwd=tmp_path, env=os.environ)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_each_rank_gets_its_own_state_back(saved: list[dict[str, Any]]) -> None:
    assert [found["own"] for found in saved] == [None, None]


def test_tensors_come_spread_as_those_that_are_there(saved: list[dict[str, Any]]) -> None:
    for found in saved:
        assert found["placements"] == OTHER
        assert found["tied"]
        assert found["other placement"] is None


def test_what_is_there_stays_unless_it_is_to_be_replaced(saved: list[dict[str, Any]], folder: Path) -> None:
    for found in saved:
        assert "rank 0: it exists already" in found["there"][0]
        assert "overwrite=True" in found["there"][1]
        assert found["unchanged"] == found["still"] == 0
        assert found["over it"] is None
    assert len(os.listdir(folder / "checkpoint")) == 3  # the manifest, and a file of each rank


def test_what_one_rank_cannot_save_no_rank_saves(saved: list[dict[str, Any]], folder: Path) -> None:
    for found in saved:
        assert f'cannot save "{folder / "checkpoint"}": rank 1: f is of type' in found["wrong"][0]
        assert "rank 0: weight is another tensor on rank 1 than on rank 0" in found["unequal"][0]
        assert "rank 0: 'w[0:4,0:3]' would be the name of two tensors" in found["twice"][0]
        assert found["full"][0] == f'cannot save "{folder / "full"}": rank 1: No space left on device'
        assert "rank 1: No space left on device" in found["full over it"][0]
        assert found["after full"] is None
        assert "several processes do not write one file" in found["archive"][0]
    assert sorted(os.listdir(folder)) == ["alone", "checkpoint", "of torch", "two"]


def test_one_rank_may_save_alone(saved: list[dict[str, Any]], folder: Path) -> None:
    assert mg.load(folder / "alone") == {"step": 3}


def test_torchs_own_checkpoints_go_on_working(saved: list[dict[str, Any]]) -> None:
    assert [found["of torch"] for found in saved] == [None, None]


def test_a_process_by_itself_loads_it(path: Path) -> None:
    assert_equal(expected(0), mg.load(path))
    assert_equal(expected(0), mg.load(path, like={}))


def loading(path: Path) -> str | None:
    rank = dist.get_rank()
    like = {"model": {name: spread(name, placement) for name, placement in OTHER.items()}}
    there = expected(rank % 2)
    return difference(there, mg.load(path)) or difference(there, whole(dict(mg.load(path, like=like))))


def test_another_number_of_ranks_loads_it(path: Path) -> None:
    assert on_ranks(loading, path, ranks=3) == [None] * 3


LAYOUTS = {
    "two of two dims": (Shard(0), Shard(1)),
    "two of one dim": (Shard(0), Shard(0)),
    "one of two": (Replicate(), Shard(1)),
    "uneven": (Shard(0), Replicate()),
}
SHAPES = {"two of two dims": (8, 6), "two of one dim": (9, 2), "one of two": (2, 7), "uneven": (3, 5)}
WHOLES = {name: torch.arange(float(a * b)).view(a, b) for name, (a, b) in SHAPES.items()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))


def saving_by_four(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        name: distribute_tensor(WHOLES[name].clone(), mesh, placements, src_data_rank=None)
        for name, placements in LAYOUTS.items()
    }
    both = model()  # FSDP2 over tensor parallel, as torch does it
    parallelize_module(both, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(both, mesh=mesh["dp"])
    mg.save(state | both.state_dict(), path)


def by_four() -> dict[str, torch.Tensor]:
    """What four ranks save, whole."""
    return WHOLES | {name: tensor.detach() for name, tensor in model().state_dict().items()}


def loading_sharded(path: Path) -> str | None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in by_four().items()
    }
    return difference(by_four(), whole(dict(mg.load(path, like=like))))


def test_four_ranks_save_what_one_two_and_three_load(tmp_path: Path) -> None:
    path = tmp_path / "four"
    on_ranks(saving_by_four, path, ranks=4)
    assert len(os.listdir(path)) == 5
    assert_equal(by_four(), mg.load(path))
    for size in (2, 3):
        assert on_ranks(loading_sharded, path, ranks=size) == [None] * size


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each part of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places_in(item, (*path, key))


def test_no_manifest_shows_itself_as_another_error(path: Path) -> None:
    """Changed and sealed anew, as somebody with bad intent would."""
    plain = json.loads((path / "manifest.json").read_bytes())
    del plain["digest"]
    draw = random.Random(0)
    others = [None, True, -1, 1, 1 << 62, 1.5, "x", "model/weight", [], {}, [[]], {"tensor": "model/weight"}]
    refused = 0
    for place in draw.sample(list(places_in(plain)), 150):
        changed = json.loads(json.dumps(plain))
        part = changed
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = draw.choice(others)
        seal(path, json.dumps(changed)[:-1] + ",\n")
        for options in ({}, {"like": {}}):
            try:
                mg.load(path, **options)
            except (mg.CheckpointError, mg.ArtifactError):
                refused += 1
    assert refused > 150


def refusing(path: Path) -> list[tuple[str, str]]:
    like = {"model": {"weight": spread("weight", Shard(0))}}
    return [refusal(mg.load, place, like=like) for place in sorted(path.iterdir())] + [
        refusal(mg.load, path / "changed", like={"model": {"weight": spread("bias", Shard(0))}})
    ]


def test_damage_is_found_and_named_on_all_ranks(path: Path, tmp_path: Path) -> None:
    all_of_them = tmp_path / "damaged"
    for kind in ("changed", "manifest", "missing", "nothing"):
        shutil.copytree(path, all_of_them / kind)
    first, second = (sorted((all_of_them / "changed").glob("*.safetensors"))[rank].name for rank in (0, 1))
    raw = bytearray((all_of_them / "changed" / second).read_bytes())
    raw[-1] ^= 1  # of the last tensor of rank 1
    (all_of_them / "changed" / second).write_bytes(raw)
    (all_of_them / "missing" / first).unlink()
    manifest = all_of_them / "manifest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"weight", b"height", 1))
    shutil.rmtree(all_of_them / "nothing")
    (all_of_them / "nothing").mkdir()

    said = {
        "changed": f"{second}: the tensor ",
        "manifest": "manifest.json was changed or cut off",
        "missing": f"it has no {first}",
        "nothing": "it has no manifest.json",
    }
    for kind, reason in said.items():
        message, hint = refusal(mg.load, all_of_them / kind)
        assert reason in message
        assert "latest()" in hint
    changed = refusal(mg.load, all_of_them / "changed")[0]
    assert "was changed: its SHA-256 does not match" in changed
    on_both = on_ranks(refusing, all_of_them)
    assert on_both[0] == on_both[1]
    for (kind, reason), (message, hint) in zip(sorted(said.items()), on_both[0], strict=False):
        assert f'cannot load "{all_of_them / kind}": rank' in message
        assert reason in message
        assert "latest()" in hint
    assert "model/weight is of shape (7, 3); here it is (8,)" in on_both[0][-1][0]
