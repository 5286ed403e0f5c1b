"""A graph with fully_shard()ed or parallelize_module()d models trains as eager mode does, bit for bit on two ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import monograph as mg
from monograph.distributed.programs.collectives import begins_collective, calls_in_order
from tests.distributed.training import Case, Wrong, assert_right, compare, local
from tests.support import assert_same

ALL = ("mlp", "mobilenet", "gpt", "lstm", "dlrm")


def mesh_of(rank: int) -> Any:
    del rank
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def sharded(rank: int, model: nn.Module, **options: Any) -> nn.Module:
    """A model whose blocks, and the rest, have their parameters in parts."""
    mesh = mesh_of(rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    for module in model.modules():
        if (module is not model and isinstance(module, (Inner, nn.TransformerEncoderLayer))) or type(
            module
        ).__name__ == "Block":
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _workload(rank: int, workload: str, optimizer: str, **options: Any) -> None:
    wrap = partial(sharded, rank)
    compare(workload, optimizer, rank, wrap, wrap, **options)


class Inner(nn.Module):
    """A part with sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.first(x).tanh())


class Net(nn.Module):
    """Parts, a shared weight, one of a single row, and one that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(Inner() for _ in range(2))
        self.first = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.first.weight
        self.row = nn.Parameter(torch.randn(1, 5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.inside:
            x = part(x)
        return self.again(x) * self.row


class Sides:
    """Two copies of a net, one for eager mode, and optimizers for both."""

    def __init__(self, rank: int, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        torch.manual_seed(0)
        base = Net()
        self.eager, self.ours = (sharded(rank, copy.deepcopy(base), **options) for _ in range(2))
        self.optimizers = [make(model.parameters()) for model in (self.eager, self.ours)]
        self.batches = torch.Generator().manual_seed(7 + rank)

    def batch(self, rows: int = 4) -> torch.Tensor:
        return torch.randn(rows, 5, generator=self.batches)

    def check(self, what: str) -> None:
        for (name, a), b in zip(self.eager.named_parameters(), self.ours.parameters(), strict=True):
            assert isinstance(b, DTensor)
            assert_same(local(a), local(b), f"{what} {name}")
            states = [item.state.get(p, {}) for item, p in zip(self.optimizers, (a, b), strict=True)]
            assert list(states[0]) == list(states[1])
            for key in states[0]:
                assert_same(local(states[0][key]), local(states[1][key]), f"{what} {name}/{key}")


class NetStep(mg.Graph):
    def __init__(self, sides: Sides, clip: float = 0.0) -> None:
        super().__init__()
        self.model, self.clip = sides.ours, clip
        self.add_optimizer(sides.optimizers[1])
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(rank: int, make: Callable[..., torch.optim.Optimizer], builds: int = 1, **options: Any) -> None:
    """Steps of an optimizer with clipping."""
    sides = Sides(rank, make, **options)
    graph = NetStep(sides, clip=1.0)
    for index in range(3):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        loss = sides.eager(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(sides.eager.parameters(), 1.0)
        sides.optimizers[0].step()
        assert_same(loss.detach(), graph(x).detach(), f"loss {index}")
        sides.check(f"step {index}")
    assert len(graph.builds) == builds, graph.explain()


def few_collectives(rank: int) -> None:
    """Parts are gathered together, again for backward where others come between, and all gradients reduced together."""
    sides = Sides(rank, adamw)
    graph = NetStep(sides)
    graph(sides.batch())
    program = graph.builds[0].program
    assert [str(op).split(".")[1] for op, _ in calls_in_order(program)] == [
        *["all_gather_into_tensor"] * 4,
        "reduce_scatter_tensor",
    ]
    phases = [node.meta["origin"].phase for node in program.ops() if begins_collective(node)]
    assert phases == ["forward"] * 3 + ["backward"] * 2
    gathers = [node for node in program.ops() if "all_gather" in str(node.target)]
    order = list(program.graph.nodes)
    for before, after in pairwise(gathers[:3]):
        (wait,) = before.users
        assert order.index(after) < order.index(wait)  # it is on its way while others are computed with
    kept = NetStep(Sides(rank, adamw, reshard_after_forward=False))
    kept(sides.batch())
    assert [str(op).split(".")[1] for op, _ in calls_in_order(kept.builds[0].program)] == [
        *["all_gather_into_tensor"] * 3,
        "reduce_scatter_tensor",
    ]


def accumulated(rank: int) -> None:
    """Sums of micro-batches are sums of parts, reduced for each."""
    sides = Sides(rank, adamw)
    graph = NetStep(sides, clip=1.0)
    graph.config.set_gradient_accumulation_steps(2)
    for index in range(2):
        x = sides.batch(8)
        sides.optimizers[0].zero_grad()
        losses = []
        for part in x.chunk(2):
            loss = sides.eager(part).square().mean()
            (loss / 2).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(sides.eager.parameters(), 1.0)
        sides.optimizers[0].step()
        assert_same(torch.stack(losses), graph(x).detach(), f"losses {index}")
        sides.check(f"step {index}")


def scaled(rank: int) -> None:
    """What one rank finds in its part counts for all."""
    sides = Sides(rank, adamw)
    graph = NetStep(sides)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    graph.set_grad_scaler(scalers[1])
    for index in range(4):
        x = sides.batch()
        if rank and index == 1:
            x[0, 0] = float("inf")
        sides.optimizers[0].zero_grad()
        loss = sides.eager(x).square().mean()
        scalers[0].scale(loss).backward()
        scalers[0].step(sides.optimizers[0])
        scalers[0].update()
        graph(x)
        assert scalers[0].get_scale() == scalers[1].get_scale(), index
        sides.check(f"step {index}")
    assert scalers[1].get_scale() == 2.0**8


def averaged(rank: int) -> None:
    sides = Sides(rank, adamw)
    graph = NetStep(sides)
    graph.add_ema(sides.ours, 0.9)
    mean: list[Any] = []
    for _ in range(3):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        sides.eager(x).square().mean().backward()
        sides.optimizers[0].step()
        present = [local(item).clone() for item in sides.eager.parameters()]
        mean = [old.lerp(new, 1 - 0.9) for old, new in zip(mean, present, strict=True)] if mean else present
        graph(x)
    with graph.ema_weights():
        assert_same(mean, [local(item) for item in sides.ours.parameters()])


def kept(rank: int) -> None:
    """Gradients that stay are DTensors, as in eager mode."""
    sides = Sides(rank, adamw)
    graph = NetStep(sides)
    graph.config.keep_gradients()
    for _ in range(2):
        x = sides.batch()
        sides.optimizers[0].zero_grad()
        sides.eager(x).square().mean().backward()
        sides.optimizers[0].step()
        graph(x)
        for (name, a), b in zip(sides.eager.named_parameters(), sides.ours.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                assert isinstance(b.grad, DTensor), name
                assert_same(local(a.grad), local(b.grad), name)


def nonfinite(rank: int) -> None:
    sides = Sides(rank, adamw)
    graph = NetStep(sides)
    graph.config.detect_nonfinite()
    graph(sides.batch())
    before = [local(item).clone() for item in sides.ours.parameters()]
    x = sides.batch()
    if rank:
        x[0, 0] = float("nan")
    with pytest.raises(mg.NonfiniteError):
        graph(x)
    assert_same(before, [local(item) for item in sides.ours.parameters()])
    graph(sides.batch())


def evaluated(rank: int) -> None:
    """A graph without an optimizer, and eager evaluation between steps."""

    class Infer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = sides.ours

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    sides = Sides(rank, adamw)
    train, infer = NetStep(sides), Infer()
    for _ in range(2):
        x = sides.batch()
        train(x)
        with torch.no_grad():
            expected = infer(x)
            assert_same(expected, sides.ours(x))


def left_whole(rank: int) -> None:
    """An eager evaluation leaves the outermost parameters whole; a step has its parts again, in the build that there is."""
    sides = Sides(rank, adamw)
    around = nn.Sequential(sides.ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        graph = NetStep(sides)
        graph.model = around
        for index in range(4):
            x = sides.batch()
            if index != 1:
                with torch.no_grad():
                    assert_same(sides.eager(x), sides.ours(x), f"outputs {index}")
            sides.optimizers[0].zero_grad()
            loss = sides.eager(x).square().mean()
            loss.backward()
            sides.optimizers[0].step()
            assert_same(loss.detach(), graph(x).detach(), f"loss {index}")
            sides.eager.reshard()
            sides.check(f"step {index}")
    assert len(graph.builds) == 1, graph.explain()


def mixed(rank: int) -> None:
    """Parameters and gradients of other types on the way."""
    for reduce in (torch.float32, None):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        trained(rank, adamw, mp_policy=policy)


def tensor_parallel(rank: int) -> None:
    """Columns and rows of the layers of a block, and its norm along the sequence."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))

    torch.manual_seed(0)
    base, mesh = Parallel(), mesh_of(rank)
    plans = (
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        },
    )
    for plan in plans:
        eager, ours = (parallelize_module(copy.deepcopy(base), mesh, plan) for _ in range(2))
        sides = [adamw(model.parameters()) for model in (eager, ours)]

        class Step(mg.Graph):
            def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)
                self.config.backend("aten")

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

        graph = Step(ours, sides[1])
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            x = torch.randn(2, 4, 8, generator=generator)
            loss = eager(x).square().mean()
            loss.backward()
            sides[0].step()
            sides[0].zero_grad()
            assert_same(loss.detach(), graph(x).detach())
            for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
                assert_same(local(a), local(b), name)
        assert len(graph.builds) == 1, graph.explain()


def refused(rank: int) -> None:
    """What a graph does not do with such tensors is an error that says what to do."""
    mesh = mesh_of(rank)
    shared = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = sides.ours

        def build(self, x: torch.Tensor) -> Any:
            return next(iter(self.model.parameters())) * 2

    sides = Sides(rank, adamw)
    with pytest.raises(mg.DistributedError, match="processes share and one of this process") as caught:
        NetStep(sides)(shared)
    assert "x.to_local()" in caught.value.hint
    first = next(iter(sides.ours.parameters()))
    assert_same(local(first) * 2, local(Step()(torch.ones(2))))
    sides.ours.set_requires_gradient_sync(False)
    with pytest.raises(mg.DistributedError, match="without synchronised gradients"):
        NetStep(sides)(sides.batch())


def synchronised_later(rank: int) -> None:
    """Gradients that wait for a later backward() are added whole; a module that was told to wait before a call is refused."""

    def body(model: Any, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        losses = []
        for index, part in enumerate(x.chunk(2)):
            model.set_requires_gradient_sync(index == 1 and last)
            loss = model(part).square().mean() / 2
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    class Waiting(NetStep):
        def build(self, x: torch.Tensor, *, last: bool = True) -> torch.Tensor:
            return body(self.model, x, last)

    for options in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        sides = Sides(rank, adamw, **options)
        step = Waiting(sides)
        for index in range(2):
            x = sides.batch(8)
            sides.optimizers[0].zero_grad()
            losses = body(sides.eager, x)
            sides.optimizers[0].step()
            assert_same(losses, step(x), f"losses {index}")
            sides.check(f"step {index}")
    assert len([op for op, _ in calls_in_order(step.builds[0].program) if "reduce" in str(op)]) == 1
    with pytest.raises(mg.DistributedError, match="waits at the end of the step"):
        step(x, last=False)
    for change, back, message in (
        (
            lambda m: m.set_requires_gradient_sync(False),
            lambda m: m.set_requires_gradient_sync(True),
            "without sync",
        ),
        (
            lambda m: m.set_gradient_divide_factor(3.0),
            lambda m: m.set_gradient_divide_factor(None),
            "with a divisor",
        ),
    ):
        change(sides.ours)
        with pytest.raises(mg.DistributedError, match=message):
            step(x)
        back(sides.ours)
    step(x)
    assert len(step.builds) == 1, step.explain()


def _sizes(rank: int) -> None:
    """Each size that has a build keeps it, whatever moves from step to step."""
    sides = Sides(rank, adamw)
    step = NetStep(sides)
    for index, rows in enumerate((4, 4, 1, 4, 1, 1)):
        x = sides.batch(rows)
        sides.optimizers[0].zero_grad()
        loss = sides.eager(x).square().mean()
        loss.backward()
        sides.optimizers[0].step()
        assert_same(loss.detach(), step(x).detach())
        sides.check(f"step {index}")
    assert len(step.builds) == 2, step.explain()


QUICK: dict[str, Case] = {
    "sizes": _sizes,
    "gpt": partial(_workload, workload="gpt", optimizer="adamw", clip=0.5, backend="exact"),
    "lstm": partial(_workload, workload="lstm", optimizer="sgd"),
    **{
        case.__name__: case
        for case in (
            *(
                few_collectives,
                accumulated,
                scaled,
                averaged,
                kept,
                nonfinite,
                evaluated,
                left_whole,
                mixed,
                tensor_parallel,
                refused,
                synchronised_later,
            ),
        )
    },
    "AdamW": partial(trained, make=adamw),
}
SWEEP: dict[str, Case] = {
    f"{workload} {optimizer}": partial(_workload, workload=workload, optimizer=optimizer)
    for workload in ALL
    for optimizer in ("adamw", "sgd")
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_a_graph_does_as_eager_mode(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", SWEEP)
def test_training_is_that_of_eager_mode(case: str, sweep: Wrong) -> None:
    assert_right(case, sweep)
