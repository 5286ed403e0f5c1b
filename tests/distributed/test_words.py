"""OneFlow's words on two ranks: placements, sbp, tensors and modules that ranks share, and collectives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import monograph as mg
import monograph.flow as flow
from monograph.distributed import placement, sbp, to_global, to_local
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


def _whole() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


def _placements(rank: int) -> None:
    every = placement.all("cpu")
    assert (every.type, every.ranks, every.hierarchy) == ("cpu", [0, 1], (2,))
    assert repr(every) == 'placement(type="cpu", ranks=[0, 1])'
    assert every == placement("cpu", range(2)) == placement("cpu", {0: [0, 1]}) != placement("cpu", [0])
    assert every.mesh == init_device_mesh("cpu", (2,))
    assert every.mesh is placement("cpu", [0, 1]).mesh
    square = placement("cpu", [[0], [1]])
    assert (square.hierarchy, square.mesh.shape, square != every) == ((2, 1), (2, 1), True)
    assert placement.of(square.mesh) == square
    with pytest.raises(mg.DistributedError, match=r"names the ranks \[2, 3\], and there are 2 processes"):
        placement("cpu", range(4))


def _parts(rank: int) -> None:
    every, whole = placement.all("cpu"), _whole()
    for dim in range(2):
        parts = whole.tensor_split(torch.tensor([2]), dim)
        shared = to_global(parts[rank].contiguous(), every, sbp.split(dim))
        assert shared.placements == (Shard(dim),)
        assert shared.shape == whole.shape
        assert_same(whole, shared.full_tensor())
        assert_same(parts[rank], to_local(shared))
    copies = to_global(whole + rank, every, sbp.broadcast)
    assert copies.placements == (Replicate(),)
    assert_same(whole, to_local(copies), "that of the first rank")
    summands = to_global(whole * (rank + 1), every, (sbp.partial_sum(),))
    assert summands.placements == (Partial(),)
    assert_same(whole * 3, summands.full_tensor())
    uneven = to_global(torch.arange(5)[3 * rank :][:3], every, sbp.split(0))
    assert_same(torch.arange(5), uneven.full_tensor())


def _moved(rank: int) -> None:
    """From each sbp to each other, with the gradients of eager DTensors."""
    every, whole = placement.all("cpu"), _whole()
    words = (sbp.split(0), sbp.split(1), sbp.broadcast, sbp.partial_sum)
    for first in words:
        for last in words:
            leaf = whole.clone().requires_grad_()
            shared = to_global(to_global(leaf, every, sbp.broadcast), sbp=first)
            moved = to_global(shared, every, last)
            assert_same(whole, moved.full_tensor().detach(), f"{first} to {last}")
            (moved.full_tensor() * whole).sum().backward()
            assert_same(whole, leaf.grad, f"gradient of {first} to {last}")


def _other_ranks(rank: int) -> None:
    one, other = placement("cpu", [0]), placement("cpu", [1])
    x = to_global(_whole() + rank, one, sbp.broadcast) * 2
    moved = to_global(x, other, sbp.broadcast)
    assert (x.shape, moved.shape, placement.of(moved.device_mesh)) == ((4, 3), (4, 3), other)
    assert [to_local(item).numel() for item in (x, moved)] == ([12, 0], [0, 12])[rank]
    if rank:
        assert_same(_whole() * 2, to_local(moved))
    square = to_global(to_global(_whole(), placement.all("cpu"), sbp.broadcast), placement("cpu", [[0], [1]]),
                       (sbp.split(0), sbp.broadcast))  # fmt: skip
    assert_same(_whole()[2 * rank :][:2], to_local(square))


def _misfits(rank: int) -> None:
    """Each rank has the error, with the rank that has something else."""
    every = placement.all("cpu")
    cases: list[tuple[torch.Tensor, Any, str]] = [
        (torch.ones(2, 2 + rank), sbp.broadcast, r"rank 1 has float32\[2, 3\] where rank 0 has float32\[2, 2\]"),
        (torch.ones(2, 2 + rank), sbp.split(0), r"rank 1 has float32\[2, 3\] where rank 0 has float32\[2, 2\]"),
        (torch.ones(2 + rank, 2), sbp.split(0), r"the ranks \[0, 1\] have \[2, 3\] rows .* \[3, 2\] are the parts of 5"),
        (torch.ones(2, dtype=(torch.float32, torch.int64)[rank]), sbp.split(0), r"rank 1 has int64\[2\]"),
        (torch.ones(2), sbp.split(1), r"split\(1\) of a tensor float32\[2\]"),
        (torch.ones(2), (sbp.split(0), sbp.broadcast), "which has 1 dimensions"),
    ]  # fmt: skip
    for tensor, signature, said in cases:
        with pytest.raises(mg.DistributedError, match=said):
            to_global(tensor, every, signature)
    with pytest.raises(mg.DistributedError, match="without a placement"):
        to_global(torch.ones(2), sbp=sbp.split(0))


def _modules(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 2))
    model[3].weight = model[2].weight
    first = [parameter.detach().clone() for parameter in model.parameters()]
    for tensor in first:
        dist.broadcast(tensor, 0)
    assert to_global(model, placement.all("cpu"), sbp.broadcast) is model
    assert model[3].weight is model[2].weight
    assert all(isinstance(item, nn.Parameter) and isinstance(item, DTensor) for item in model.parameters())
    assert_same(first, [item.to_local().detach() for item in model.parameters()])
    assert isinstance(model[1].running_mean, DTensor)
    assert isinstance(model[4].weight_ih_l0, DTensor)
    to_local(model)
    assert not any(isinstance(item, DTensor) for item in model.state_dict().values())
    nested = to_global({"a": [torch.ones(2)], "b": 1}, placement.all("cpu"), sbp.split(0))
    assert nested["a"][0].shape == (4,)
    assert nested["b"] == 1


def _flow_words(rank: int) -> None:
    every = flow.placement.all("cpu")
    assert (flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_node_size()) == (rank, 2, 1)
    assert flow.env.get_local_rank() == int(os.environ.get("LOCAL_RANK", rank))
    x = torch.full((2, 3), float(rank)).to_global(placement=every, sbp=flow.sbp.split(0))
    assert x.is_global
    assert not x.is_local
    assert x.placement == every
    assert x.sbp == (flow.sbp.split(0),)
    assert x.to_global(sbp=flow.sbp.broadcast).sbp == (flow.sbp.broadcast,)
    assert x.numpy().tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert torch.ones(1).is_local
    assert flow.to_local(x).shape == (2, 3)
    linear = flow.nn.Linear(3, 2, bias=False).to_global(placement=every, sbp=flow.sbp.broadcast)
    flow.nn.init.constant_(linear.weight, 2.0)
    assert linear(x).sbp == (flow.sbp.split(0),)
    assert linear(x).to_local().tolist() == [[6.0 * rank] * 2] * 2
    torch.manual_seed(rank)  # the first rank's numbers count
    for made, shape in (
        (flow.randn(4, 3, placement=every, sbp=flow.sbp.split(1)), (4, 3)),
        (flow.randint(1, 9, (4, 3), dtype=torch.float32, placement=every, sbp=[flow.sbp.broadcast]), (4, 3)),
        (flow.arange(5, placement=every, sbp=flow.sbp.split(0)), (5,)),
        (flow.ones(2, placement=every, sbp=flow.sbp.partial_sum), (2,)),
        (flow.tensor([1.0, 2.0], placement=every, sbp=flow.sbp.split(0), requires_grad=True), (2,)),
    ):
        assert isinstance(made, DTensor)
        assert made.shape == shape
        whole = made.full_tensor().detach()
        first = whole.clone()
        dist.broadcast(first, 0)
        assert_same(first, whole)
    assert made.requires_grad
    assert flow.ones(2, placement=every, sbp=flow.sbp.partial_sum).full_tensor().tolist() == [1.0, 1.0]
    wrapped = flow.nn.parallel.DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)


def _collectives(rank: int) -> None:
    comm, mine = flow.comm, torch.arange(4.0) + 10 * rank
    both = [torch.arange(4.0), torch.arange(4.0) + 10]
    comm.barrier()
    assert_same(both[0] + both[1], comm.all_reduce(mine.clone()))
    assert_same(
        both[1] if rank == 0 else both[0] + both[1],
        comm.reduce(both[1].clone() if rank == 0 else both[0].clone(), 1),
    )
    assert_same(both[1], comm.broadcast(mine.clone(), 1))
    found = [torch.zeros(4) for _ in range(2)]
    comm.all_gather(found, mine)
    assert_same(both, found)
    one = torch.zeros(8)
    comm.all_gather_into_tensor(one, mine)
    assert_same(torch.cat(both), one)
    comm.gather(mine, found if rank == 0 else None, 0)
    part = torch.zeros(4)
    comm.scatter(part, both if rank == 1 else None, 1)
    assert_same(both[rank], part)
    comm.all_to_all(found, [mine, mine + 1])
    assert_same([both[0] + rank, both[1] + rank], found)
    comm.reduce_scatter(part, [mine, mine + 1])
    assert_same(both[0] + both[1] + 2 * rank, part)
    half = torch.zeros(2)
    comm.reduce_scatter_tensor(half, mine)
    assert_same((both[0] + both[1])[2 * rank :][:2], half)
    if rank == 0:
        comm.send(mine, 1)
        comm.send(mine, 1, send_meta=False)
    else:
        assert_same(both[0], comm.recv(0))
        assert_same(both[0], comm.recv(0, (4,), torch.float32, "cpu", out=torch.empty(4)))
    with pytest.raises(mg.DistributedError, match="there is no process 2 among 2"):
        comm.broadcast(mine, 2)
    with pytest.raises(mg.DistributedError, match="1 tensors for 2 processes"):
        comm.all_gather(found[:1], mine)


def _as_torch_lays_out(rank: int) -> None:
    """Shared tensors are DTensors like those of torch, which a program may mix with them."""
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    theirs = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    ours = to_global(whole[3 * rank :][:3], placement.all("cpu"), sbp.split(0))
    assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
    assert_same((theirs * 2).to_local(), (ours + theirs).to_local())


QUICK: dict[str, Case] = {
    "placements": _placements,
    "parts": _parts,
    "moved": _moved,
    "other ranks": _other_ranks,
    "misfits": _misfits,
    "modules": _modules,
    "flow words": _flow_words,
    "collectives": _collectives,
    "as torch": _as_torch_lays_out,
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_words(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


WORDS: dict[str, Callable[[], object]] = {
    "placement": lambda: placement("cpu", [0]),
    "all": lambda: placement.all("cpu"),
    "to_global": lambda: to_global(torch.ones(2)),
}


@pytest.mark.parametrize("word", WORDS)
def test_processes_that_have_not_found_each_other_are_told(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mg.DistributedError, match="started 2 processes, which have not found") as caught:
        WORDS[word]()
    assert "init_process_group()" in caught.value.hint


def test_a_process_without_a_group_has_no_mesh() -> None:
    with pytest.raises(mg.DistributedError, match="without a group"):
        _ = placement("cpu", [0]).mesh
