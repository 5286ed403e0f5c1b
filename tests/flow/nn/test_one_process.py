"""What OneFlow spreads over processes: in one process it changes no numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import monograph.flow as flow
from monograph.errors import DefinitionError, DistributedError
from monograph.flow.nn.graph import GraphModule
from tests.flow.steps import TrainStep, batches, check_told, net, plain, sgd, trained, weights
from tests.support import assert_same

CPU = flow.placement("cpu", ranks=[0])


def test_there_is_one_process() -> None:
    assert (flow.env.get_rank(), flow.env.get_local_rank()) == (0, 0)
    assert (flow.env.get_world_size(), flow.env.get_node_size()) == (1, 1)
    assert flow.env.all_device_placement("cpu") == CPU == flow.placement.all("cpu")
    assert not flow.env.rdma_is_initialized()


def test_one_of_several_processes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    asking = [
        flow.env.get_rank,
        flow.env.get_world_size,
        flow.env.get_local_rank,
        flow.env.get_node_size,
        lambda: flow.placement("cpu", [0]),
        lambda: flow.env.all_device_placement("cpu"),
    ]
    for ask in asking:
        with pytest.raises(DistributedError) as caught:
            ask()
        check_told(caught.value, "started 2 processes", "MASTER_ADDR", hint="torchrun")


@pytest.mark.every_case
@pytest.mark.parametrize("ranks", [0, [0], range(1), {0: [0]}])
def test_placements_of_the_one_process(ranks: Any) -> None:
    placed = flow.placement("cpu", ranks=ranks)
    assert placed == CPU
    assert hash(placed) == hash(CPU)
    assert placed != flow.placement("meta", ranks=ranks)


@pytest.mark.every_case
@pytest.mark.parametrize("ranks", [[0, 1], [1], 3, [[0, 1], [2, 3]], range(4)])
def test_placements_of_more_processes_are_refused(ranks: Any) -> None:
    with pytest.raises(DistributedError) as caught:
        flow.placement("cpu", ranks=ranks)
    others = "3" if ranks == 3 else "1"
    check_told(caught.value, f"placement('cpu', {ranks})", others, "one process, of rank 0", hint="ranks=[0]")


@pytest.mark.parametrize("ranks", [[], [0, 0], [[0], [0, 1]], [[0], 0], {1: [0]}])
def test_ranks_that_are_no_mesh_are_refused(ranks: Any) -> None:
    with pytest.raises(DistributedError) as caught:
        flow.placement("cpu", ranks=ranks)
    check_told(caught.value, hint="ranks=[0, 1")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "signature",
    [
        flow.sbp.split(0),
        flow.sbp.split(dim=1),
        flow.sbp.broadcast,
        flow.sbp.broadcast(),
        flow.sbp.partial_sum,
        [flow.sbp.split(0)],
    ],
    ids=str,
)
def test_a_tensor_of_one_process_is_itself(signature: Any) -> None:
    x = torch.randn(2, 3)
    assert flow.to_global(x, placement=CPU, sbp=signature) is x
    assert flow.to_local(flow.to_global(x, CPU, signature)) is x
    assert flow.local_to_global(x, CPU, signature) is x
    assert flow.global_to_global(x, CPU, signature) is x


def test_a_placement_moves_to_its_device() -> None:
    moved = flow.to_global(torch.ones(2), flow.placement("meta", ranks=[0]), flow.sbp.broadcast)
    assert (moved.device.type, moved.shape) == ("meta", (2,))


def test_signatures_print_and_compare() -> None:
    assert flow.sbp.split(0) == flow.sbp.split(0) != flow.sbp.split(1)
    assert flow.sbp.broadcast() == flow.sbp.broadcast
    assert [str(item) for item in (flow.sbp.split(2), flow.sbp.broadcast, flow.sbp.partial_sum)] == [
        "sbp.split(dim=2)",
        "sbp.broadcast",
        "sbp.partial_sum",
    ]
    assert str(CPU) == 'placement(type="cpu", ranks=[0])'
    assert (CPU.ranks, CPU.hierarchy) == ([0], (1,))


def test_methods_of_tensors_and_modules_change_nothing() -> None:
    x, model = torch.ones(1), net()
    assert x.to_global(placement=CPU, sbp=flow.sbp.broadcast) is x.to_local() is x
    assert model.to_global(placement=CPU, sbp=flow.sbp.broadcast) is model.to_local() is model
    assert (x.is_global, x.is_local) == (False, True)
    for name in ("placement", "sbp"):
        with pytest.raises(DistributedError, match=f"this process alone has no {name}"):
            getattr(x, name)


def test_factories_move_to_the_device_of_a_placement() -> None:
    made = flow.ones(2, 3, placement=flow.placement("meta", [0]), sbp=flow.sbp.split(0), requires_grad=True)
    assert (made.device.type, made.shape, made.requires_grad) == ("meta", (2, 3), True)
    assert_same(torch.arange(3), flow.arange(3))


def test_collectives_of_one_process_add_nothing() -> None:
    x, other = torch.arange(4.0), torch.zeros(4)
    flow.comm.barrier()
    assert flow.comm.all_reduce(x) is flow.comm.reduce(x, 0) is flow.comm.broadcast(x, 0) is x
    for call in (
        lambda: flow.comm.all_gather([other], x),
        lambda: flow.comm.all_gather_into_tensor(other, x),
        lambda: flow.comm.gather(x, [other]),
        lambda: flow.comm.scatter(other, [x]),
        lambda: flow.comm.all_to_all([other], [x]),
        lambda: flow.comm.reduce_scatter(other, [x]),
        lambda: flow.comm.reduce_scatter_tensor(other, x),
    ):
        other.zero_()
        call()
        assert_same(x, other)
    for call in (
        lambda: flow.comm.send(x, 1),
        lambda: flow.comm.recv(0),
        lambda: flow.comm.broadcast(x, 2),
        lambda: flow.comm.all_gather([other, other], x),
    ):
        with pytest.raises(DistributedError, match="one"):
            call()
    flow.boxing.nccl.set_fusion_threshold_mbytes(16)
    flow.boxing.nccl.enable_use_compute_stream(True)


def test_one_process_needs_no_wrapper() -> None:
    model = net()
    assert flow.nn.parallel.DistributedDataParallel(model) is model


def staged() -> TrainStep:
    """A pipeline of two stages with accumulation and ZeRO, as a script for several devices would have it."""
    model = net()
    step = TrainStep(model, sgd(model, momentum=0.9))
    step.model[0].to(GraphModule).set_stage(0, CPU)
    step.model[2].to(GraphModule).set_stage(stage_id=1, placement=CPU)
    step.config.set_gradient_accumulation_steps(2)
    with pytest.warns(UserWarning, match="enable_zero has no effect: there is one process"):
        step.config.enable_zero(True, stage=1, shard_min_size=64, shard_restore_level=1)
    return step


def test_stages_and_zero_change_no_numbers() -> None:
    reference, model = net(), net()
    optimizer = sgd(reference, momentum=0.9)
    step = staged()
    model = step.model.to(torch.nn.Module)
    for x in batches(3):
        optimizer.zero_grad()
        for part in x.chunk(2):
            (torch.nn.functional.smooth_l1_loss(reference(part), torch.ones(2, 2)) / 2).backward()
        optimizer.step()
        step(x)
    assert_same(weights(reference), weights(model))
    assert {parameter.shape for parameter in model.parameters()} == {p.shape for p in net().parameters()}


def test_a_stage_is_told_and_shown() -> None:
    step = staged()
    first, second = (step.model[index].to(GraphModule) for index in (0, 2))
    assert (first.stage_id, first.stage_placement, second.stage_id) == (0, CPU, 1)
    assert step.model[1].to(GraphModule).stage_id is None
    assert repr(second) == "(GraphModule:model.2(stage_id=1, ))"
    second.stage_id = 3
    assert (second.stage_id, second.stage_placement) == (3, CPU)


@pytest.mark.parametrize(
    ("args", "told", "hint"),
    [
        ((-1,), "set_stage(-1)", "set_stage(0)"),
        (("0",), "set_stage('0')", "set_stage(0)"),
        ((0, "cpu"), "got a str as placement", "flow.placement("),
    ],
)
def test_a_wrong_stage_is_told(args: Any, told: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        staged().model[0].to(GraphModule).set_stage(*args)
    check_told(caught.value, told, hint=hint)


def test_checkpointing_of_activations_changes_no_numbers() -> None:
    reference, model = net(), net()
    step = TrainStep(model, sgd(model))
    view = step.model[0].to(GraphModule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.activation_checkpointing = True
    assert view.activation_checkpointing is True
    assert repr(view) == "(GraphModule:model.0(activation_checkpointing=True, ))"
    assert_same(plain(reference, sgd(reference), batches(2)), trained(step, batches(2)))
    assert_same(weights(reference), weights(model))
