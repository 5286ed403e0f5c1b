"""plan(): what ranks will hold and send, without a process group and without any change here."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import monograph as mg
from monograph.compat.distributed.fake_group import pretend_to_be
from monograph.distributed.planning.events import Begin
from monograph.distributed.planning.mesh import kinds_of_ranks, mesh_of
from monograph.errors import ConfigError, DefinitionError, DistributedError
from tests.support import ROOT, assert_same


def linear(width: int = 64, optimizer: Any = torch.optim.AdamW) -> mg.Graph:
    with torch.device("meta"):
        model = nn.Linear(width, width)
        return mg.train_graph(model, nn.MSELoss(), optimizer(model.parameters(), lr=0.1))


def planned(step: mg.Graph, width: int = 64, **options: Any) -> Any:
    return step.plan(mg.spec((8, width), device="meta"), mg.spec((8, width), device="meta"), **options)


def sent(plan: Any) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (item.collective, item.dimension): (item.count, item.payload_bytes) for item in plan.ranks[0].sent
    }


WEIGHT, BIAS = 64 * 64 * 4, 64 * 4  # bytes


def test_what_is_sent_over_each_dimension_of_a_grid():
    plan = planned(linear(), world_size=8, mesh={"far": 2, "near": 4}, zero=3)
    assert sent(plan) == {
        ("all_gather_into_tensor", "near"): (1, WEIGHT * 3 // 4),
        ("reduce_scatter_tensor", "near"): (1, WEIGHT * 3 // 4),
        ("all_reduce", "far"): (sent(plan)["all_reduce", "far"][0], WEIGHT // 4 + BIAS),
        ("all_reduce", "near"): (1, BIAS * 2 * 3 // 4),
    }
    assert [item.rank for item in plan.ranks] == [0, 7]
    assert sum(item.like for item in plan.ranks) == 8


def test_a_grid_adds_few_sums():
    """What is scattered over near ranks is summed over far ones after that: all parts at once."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    counts = {
        key: count for key, (count, _) in sent(planned(step, world_size=4, mesh=(2, 2), zero=3)).items()
    }
    assert counts == {
        ("all_gather_into_tensor", "shard"): 1,
        ("reduce_scatter_tensor", "shard"): 1,
        ("all_reduce", "replicate"): 1,
        ("all_reduce", "shard"): 1,
    }


def test_what_ranks_hold():
    for zero, parameters, state in ((None, 1, 2), (1, 1, 2 / 4), (2, 1, 2 / 4), (3, 1 / 4, 2 / 4)):
        (first, last) = planned(linear(), world_size=4, zero=zero).ranks
        small = BIAS * 2 + 8  # of the bias, and two counters of steps
        assert first.parameter_bytes == WEIGHT * parameters + BIAS
        assert first.optimizer_bytes == WEIGHT * state + small
        assert first.state_bytes == first.parameter_bytes + first.optimizer_bytes
        assert (first.argument_bytes, last.total_bytes) == (2 * 8 * 64 * 4, first.total_bytes)


def test_uneven_parts_are_planned_and_the_number_of_ops_stays():
    counts = {}
    for size in (16, 1000):
        plan = planned(linear(50), 50, world_size=size, zero=3)
        held = [item.parameter_bytes - 50 * 4 for item in plan.ranks]
        assert held == sorted(held, reverse=True)
        assert sum(item.like for item in plan.ranks) == size
        counts[size] = plan.ranks[0].num_ops, plan.ranks[-1].num_ops
    assert len(set(counts.values())) == 1


def test_which_ranks_are_planned():
    def kinds(size: int, *rows: int) -> dict[int, int]:
        return dict(kinds_of_ranks(mesh_of(size, None), rows))

    assert kinds(4, 8, 64) == {0: 3, 3: 1}
    assert kinds(4, 7) == {0: 3, 3: 1}
    assert kinds(4, 5) == {0: 2, 2: 1, 3: 1}  # 2, 2, 1 and 0 rows
    assert sum(kinds(1000, 104, 208, 416, 77, 5).values()) == 1000
    assert len(kinds(1000, 104, 208, 416, 77, 5)) == 4


def test_nothing_is_changed_here():
    torch.manual_seed(0)
    model, x, y = nn.Linear(64, 64), torch.randn(512, 64), torch.randn(512, 64)
    nn.MSELoss()(model(x), y).backward()  # threads of autograd and of kernels have run
    model.zero_grad()
    alone = copy.deepcopy(model)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    other = mg.train_graph(alone, nn.MSELoss(), torch.optim.AdamW(alone.parameters()))
    before, random = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    parameters = [*map(id, model.parameters())]
    for stage in (None, 3):
        step.plan(x, y, world_size=4, zero=stage)
        assert_same(before, step.state_dict())
        assert torch.equal(random, torch.get_rng_state())
        assert [*map(id, model.parameters())] == parameters
        assert not dist.is_initialized()
        assert not step.builds
        assert step.config.settings == other.config.settings
    for _ in range(2):
        assert_same(step(x, y), other(x, y))
    assert_same(model.state_dict(), alone.state_dict())
    assert len(step.builds) == 1


def test_gradients_are_reduced_once_a_step_or_for_each_micro_batch():
    counts = {}
    for stage in (1, 2):
        step = linear()
        step.config.set_gradient_accumulation_steps(4)
        found = sent(planned(step, world_size=2, zero=stage))
        counts[stage] = found["reduce_scatter_tensor", "data"][0]
    assert counts == {1: 1, 2: 4}


@pytest.mark.parametrize("clip", [False, True])
def test_infinities_of_all_parts_count_whichever_gradient_is_the_first(clip: bool):
    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.set_grad_scaler(torch.amp.GradScaler("cpu"))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

    plan = Scaled().plan(mg.spec((4, 64)), world_size=2, zero=3)
    what = [event.what for event in plan.steps[0].events if isinstance(event, Begin)]
    assert [text for text in what if text.startswith("all_reduce(max)")]


def test_times():
    plan = planned(linear(), world_size=8, mesh=(2, 4), zero=3)
    near = plan.predict(link_bytes_per_second={"replicate": 1e9, "shard": 1e10})
    far = plan.predict(link_bytes_per_second={"replicate": 1e6, "shard": 1e10})
    assert far.step_seconds > near.step_seconds
    assert far.work_seconds == near.work_seconds
    assert 0 <= near.exposed <= 1
    assert near.step_seconds == pytest.approx(near.work_seconds + near.exposed_seconds)
    assert near.bubble == 0.0
    free = plan.predict(link_bytes_per_second=float("inf"), latency_seconds=0.0)
    assert free.exposed_seconds == 0.0
    work = plan.predict(flops_per_second=1e9, memory_bytes_per_second=float("inf"))
    assert work.work_seconds == pytest.approx(3 * 2 * 8 * 64 * 64 / 1e9, rel=0.4)  # two products, or three
    with pytest.raises(DefinitionError, match="'replicate'"):
        plan.predict(link_bytes_per_second={"shard": 1e10})
    with pytest.raises(DefinitionError, match="flops per second are 0"):
        plan.predict(flops_per_second=0)


def test_it_is_shown_as_a_table():
    text = str(planned(linear(), world_size=8, mesh=(2, 4), zero=3))
    assert "8 ranks (replicate 2 x shard 4)" in text
    assert "reduce_scatter_tensor" in text
    assert "exposed" in text


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"world_size": 1}, DistributedError, "two processes at least"),
        ({"world_size": "8"}, DistributedError, "world_size='8'"),
        ({"world_size": 8, "mesh": (2, 3)}, DistributedError, "has 6 processes, and world_size=8"),
        ({"world_size": 8, "mesh": (2, 2, 2)}, DistributedError, "one or two dimensions"),
        ({"world_size": 8, "mesh": {"a": 0, "b": 8}}, DistributedError, "ints from 1 on"),
        ({"world_size": 8, "zero": 4}, ConfigError, "stages 1, 2 and 3"),
        ({"world_size": 8, "zero": 0}, ConfigError, "plain data parallel is planned without `zero`"),
    ],
)
def test_what_cannot_be_planned(options: dict[str, Any], error: type[Exception], said: str):
    step = linear()
    with pytest.raises(error, match=said):
        planned(step, **options)
    assert not step.builds


def test_a_plan_inside_of_a_group_is_refused():
    pretend_to_be(0, 2)
    try:
        with pytest.raises(DistributedError, match="inside of a process group"):
            planned(linear(), world_size=8)
    finally:
        dist.destroy_process_group()


class Own(Exception):
    """An error of the user's."""


def test_an_error_of_build_comes_back():
    class Failing(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            raise Own("here")

    with pytest.raises(Own, match="here"):
        Failing().plan(mg.spec((2,)), world_size=2)


def test_a_step_that_updates_by_its_own_batch_is_refused():
    class Wrong(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 4)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum()
            loss.backward()
            assert self.model.bias.grad is not None
            self.model.bias.grad += x.mean(0)
            return loss

    with pytest.raises(
        DistributedError, match=r"model\.bias comes of the batches of some ranks: never reduced"
    ):
        Wrong().plan(mg.spec((2, 4)), world_size=2)


class Staged(mg.Graph):
    """A stage for each layer, and as many micro-batches of two rows as said."""

    def __init__(self, stages: int, batches: int, device: str = "meta") -> None:
        super().__init__()
        with torch.device(device):
            layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(stages)]
            self.model = nn.Sequential(*layers)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        for stage, layer in enumerate(self.model):
            layer.to(mg.GraphModule).set_stage(stage)
        self.config.set_gradient_accumulation_steps(batches)
        self.batch = mg.spec((2 * batches, 16), device=device)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def test_a_pipeline_is_planned_rank_by_rank():
    held, bubbles = {}, {}
    for schedule in ("GPipe", "1F1B"):
        step = Staged(4, 12)
        plan = step.plan(step.batch, world_size=4, pipeline=schedule)
        assert [item.rank for item in plan.ranks] == [0, 1, 2, 3]
        activations = 12 * 2 * 16 * 4
        assert sent(plan)["send", "pipeline"] == (12, activations)
        assert plan.ranks[1].payload_bytes == pytest.approx(2 * activations, rel=0.05)  # and the loss
        assert {item.parameter_bytes for item in plan.ranks} == {16 * 16 * 4 + 16 * 4}
        held[schedule] = plan.ranks[3].peak_bytes
        free = plan.predict(link_bytes_per_second=float("inf"), latency_seconds=0.0)
        bubbles[schedule] = free.bubble
        assert not step.builds
    assert held["1F1B"] < held["GPipe"]  # the last rank goes back at once
    assert 0.1 < bubbles["1F1B"] < 0.4  # 3 / 15 if stages took as long as each other
    assert bubbles["1F1B"] == pytest.approx(bubbles["GPipe"], abs=0.03)


def test_copies_of_a_pipeline_are_planned():
    step, weight, bias = Staged(4, 4), 16 * 16 * 4, 16 * 4
    plan = step.plan(step.batch, world_size=12, mesh=(3, 4))
    assert [(item.rank, item.like) for item in plan.ranks] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert sent(plan)["all_reduce", "replicate"] == (1, -(-2 * 2 * (weight + bias) // 3))
    assert sent(plan)["send", "pipeline"] == (4, 4 * 2 * 16 * 4)
    step.config.enable_zero(stage=2, shard_min_size=64)
    plan = step.plan(step.batch, world_size=12, mesh={"dp": 3, "pp": 4})
    assert [(item.rank, item.like) for item in plan.ranks] == [
        *((rank, 2) for rank in range(4)),
        *((rank, 1) for rank in range(8, 12)),
    ]
    assert sent(plan)["reduce_scatter_tensor", "dp"][0] == 4  # for each micro-batch
    assert plan.predict(link_bytes_per_second={"dp": 1e9, "pp": 1e10}).step_seconds > 0


class Uneven(Staged):
    """Stages of other sizes, of which each gives other values to a norm, and to the search for infinities."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__(2, 2)
        with torch.device("meta"):
            self.model[1].append(nn.LayerNorm(16))
        self.add_optimizer(torch.optim.SGD(self.model[1][2].parameters(), lr=0.1))
        self.model[1].to(mg.GraphModule).set_stage(1)
        if scaled:
            self.set_grad_scaler(torch.amp.GradScaler("cpu"))
        else:
            self.config.detect_nonfinite()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("options", [{"world_size": 2}, {"world_size": 4, "mesh": (2, 2), "zero": 1}])
def test_stages_that_are_not_alike_have_one_norm(options: dict[str, Any], scaled: bool):
    step = Uneven(scaled=scaled)
    if "zero" in options:
        step.config.enable_zero(stage=options["zero"], shard_min_size=64)
    plan = step.plan(step.batch, **{name: item for name, item in options.items() if name != "zero"})
    assert plan.predict().step_seconds > 0


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_two_stages_on_each_rank_are_planned(schedule: str):
    step = Staged(4, 4)
    plan = step.plan(step.batch, world_size=2, pipeline=schedule)
    assert 0 < plan.predict().bubble < 0.5


def test_pipelines_that_cannot_be_planned():
    step = Staged(4, 4)
    with pytest.raises(ConfigError, match="no such schedule"):
        step.plan(step.batch, world_size=4, pipeline="2F2B")
    with pytest.raises(DistributedError, match="no pipeline of 4 stages on 3 ranks"):
        step.plan(step.batch, world_size=3)
    with pytest.raises(DistributedError, match="no pipeline of 4 stages on 2 ranks"):
        step.plan(step.batch, world_size=4, mesh=(2, 2))
    with pytest.raises(DistributedError, match="nobody has said which processes are the stages"):
        step.plan(step.batch, world_size=4, zero=2)
    with pytest.raises(DistributedError, match="enable_zero\\(stage=3\\)"):
        step.plan(step.batch, world_size=8, mesh=(2, 4), zero=3)
    with pytest.raises(DistributedError, match="have no stages"):
        planned(linear(), world_size=4, pipeline="1F1B")


LARGE = """
import resource, torch, monograph as mg
from tests.support.llama import Shape, Training
step = Training(Shape(layers=12, width=256, heads=4, groups=4, inner=512, words=1000, length=64))
plan = step.plan(mg.spec((2, 64), torch.int64, "meta"), world_size=1024, mesh=(128, 8), zero=3)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, plan.world_size, *(item.num_ops for item in plan.ranks))
"""
DEEP = """
import resource
from tests.distributed.test_planning import Staged
step = Staged(64, 256)
plan = step.plan(step.batch, world_size=64)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, plan.world_size, *(item.num_ops for item in plan.ranks))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ranks", "most"),
    [(LARGE, 1024, 6000), pytest.param(DEEP, 64, 12_000, marks=pytest.mark.ranks)],
)
def test_many_ranks_take_little_memory(script: str, ranks: int, most: int):
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kilobytes, size, *ops = map(int, said.stdout.split())
    assert size == ranks
    assert kilobytes < 1 << 20
    assert max(ops) < most
