"""A graph with DistributedDataParallel, or with enable_data_parallel(), trains as eager DistributedDataParallel, bit for bit."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed.programs.collectives import calls_in_order
from tests.distributed.training import (
    OPTIMIZERS,
    WORKLOADS,
    Case,
    Step,
    Trained,
    Wrong,
    assert_right,
    compare,
    eager_step,
)
from tests.support import assert_same

_ON = {"aten": ("mlp", "mobilenet", "gpt", "lstm", "dlrm"), "exact": ("mlp", "gpt")}


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def parallel(graph: mg.Graph) -> None:
    graph.config.enable_data_parallel()


def _wrapped(rank: int, workload: str, optimizer: str, **options: Any) -> None:
    compare(workload, optimizer, rank, DistributedDataParallel, DistributedDataParallel, **options)


def _plain(rank: int, workload: str, optimizer: str, **options: Any) -> None:
    compare(workload, optimizer, rank, DistributedDataParallel, as_it_is, parallel, **options)


_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
OWN_BUFFERS = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class Net(nn.Module):
    """Buffers that steps change and one that they do not, a transposed weight, a shared one, one that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.other = nn.Linear(6, 6)
        self.other.weight = nn.Parameter(torch.randn(6, 6))
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.other.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("mask", torch.arange(6) % 2 == 0)

    def forward(self, x: torch.Tensor, *, use: bool = True) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh() * self.mask
        x = self.again(self.other(x)) @ self.turned.t()
        return x + self.unused(x[:, :3]).sum() if use else x


def pair(rank: int, **options: Any) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """Two wrapped copies of a net that is another one on each rank."""
    torch.manual_seed(rank)
    base = Net()
    first, second = (DistributedDataParallel(copy.deepcopy(base), **options) for _ in range(2))
    return first, second


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): item.clone() for name, item in model.state_dict().items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class NetStep(mg.Graph):
    """A step of a net, whose `body(model, x)` leaves gradients and gives a loss."""

    def __init__(self, model: nn.Module, body: Callable[..., torch.Tensor], backend: str = "aten") -> None:
        super().__init__()
        self.model, self.body = model, body
        self.add_optimizer(sgd(model))
        self.config.backend(backend)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.model, x)


def plain_body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def check(
    rank: int,
    body: Callable[..., torch.Tensor] = plain_body,
    configure: Callable[[mg.Graph], None] = as_it_is,
    eager: Callable[..., torch.Tensor] | None = None,
    *,
    steps: int = 3,
    rows: tuple[int, ...] = (4,),
    **options: Any,
) -> NetStep:
    """Train the net both ways; `eager(model, x)` is what torch does alone in place of `body`."""
    first, second = pair(rank, **options)
    optimizer, graph = sgd(first), NetStep(second, body)
    configure(graph)
    generator = torch.Generator().manual_seed(10 + rank)
    for index in range(steps):
        x = torch.randn(rows[index % len(rows)], 4, generator=generator)
        optimizer.zero_grad()
        expected = (eager or body)(first, x)
        optimizer.step()
        got = graph(x)
        assert_same(expected.detach(), got.detach(), f"loss {index}")
        assert_same(state_of(first), state_of(second), f"step {index}")
    return graph


# --- the cases: each runs on both ranks -----------------------------------------------------------------------------


def two_forwards(rank: int) -> None:
    """As in a GAN: buffers are those of the first rank before each of them."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + model(x + 1).mean()
        loss.backward()
        return loss

    check(rank, body)


def two_backwards(rank: int) -> None:
    """Each averages what is there, and there is a forward before each."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        plain_body(model, x)
        return plain_body(model, 2 * x)

    check(rank, body, **OWN_BUFFERS)


def unsynchronised(rank: int) -> None:
    """`no_sync()` inside of a step: the sum is averaged with the second backward()."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            plain_body(model, x)
        return plain_body(model, 2 * x)

    check(rank, body, **OWN_BUFFERS)


def accumulated(rank: int) -> None:
    """One call is a step of micro-batches: one sum over the ranks, and buffers of the first rank once."""

    def eager(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for index, part in enumerate(x.chunk(2)):
            if index:
                losses.append(part_of(model, part))
            else:
                with model.no_sync():
                    losses.append(part_of(model, part))
        return torch.stack(losses)

    def part_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        (loss / 2).backward()
        return loss.detach()

    graph = check(
        rank, plain_body, lambda graph: graph.config.set_gradient_accumulation_steps(2), eager, rows=(8,)
    )
    assert collectives(graph) == ["broadcast", "all_reduce"]


def kept(rank: int) -> None:
    """Gradients that stay are those that eager mode leaves."""
    first, second = pair(rank)
    graph = NetStep(second, plain_body)
    graph.config.keep_gradients()
    x = torch.randn(4, 4) + rank
    plain_body(first, x)
    graph(x)
    for (name, expected), got in zip(first.named_parameters(), second.parameters(), strict=True):
        assert_same(expected.grad, got.grad, name)
        assert expected.grad is not None
        assert got.grad is not None
        assert expected.grad.stride() == got.grad.stride()


def unused_found(rank: int) -> None:
    """Without a gradient on all ranks there is none."""
    check(rank, lambda model, x: plain_body(partial(model, use=False), x), find_unused_parameters=True)


def unused_refused(rank: int) -> None:
    _, model = pair(rank)
    graph = NetStep(model, lambda model, x: plain_body(partial(model, use=False), x))
    before = state_of(model)
    with pytest.raises(
        mg.DistributedError, match=r"model\.module\.unused\.weight and 1 more got no gradient"
    ):
        graph(torch.randn(4, 4))
    assert_same(before, state_of(model))


def other_sizes(rank: int) -> None:
    """Batches of other sizes, and on each rank another one."""
    check(rank, rows=(4, 6 + rank, 4, 5))


def ignoring(rank: int) -> None:
    """Gradients of some parameters are each rank's own."""
    first, second = pair(rank)
    for model in (first, second):
        model.parameters_to_ignore = {"first.weight"}
    graph = NetStep(second, plain_body)
    x = torch.randn(4, 4) + rank
    graph(x)
    plain_body(first.module, x)  # no rank asks another one
    own = first.module.first.weight
    assert_same(torch.add(own.detach(), own.grad, alpha=-0.1), second.module.first.weight.detach())


def scaled(rank: int) -> None:
    """A gradient that one rank's loss makes infinite lets all ranks skip the step."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain_body(model, x)

    first, second = pair(rank)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    graph = NetStep(second, body)
    graph.set_grad_scaler(scalers[1])
    optimizer = sgd(first)
    for index in range(4):
        x = torch.randn(4, 4) + rank
        if rank and index == 1:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        loss = first(x).square().mean()
        scalers[0].scale(loss).backward()
        scalers[0].step(optimizer)
        scalers[0].update()
        got = graph(x)
        if not (rank and index == 1):
            assert_same(loss.detach(), got.detach(), f"loss {index}")
        weights = [
            {name: item.clone() for name, item in model.module.named_parameters()}
            for model in (first, second)
        ]
        assert_same(weights[0], weights[1], f"step {index}")
        assert scalers[0].get_scale() == scalers[1].get_scale(), index
        assert (scalers[1].get_scale() == 2.0**7) == (index in (1, 2))


def averaged(rank: int) -> None:
    """An average over steps is that of the averaged weights."""
    first, second = pair(rank)
    graph = NetStep(second, plain_body)
    graph.add_ema(second, 0.9)
    optimizer = sgd(first)
    mean: list[torch.Tensor] = []
    for _ in range(3):
        x = torch.randn(4, 4) + rank
        optimizer.zero_grad()
        plain_body(first, x)
        optimizer.step()
        present = [item.detach().clone() for item in first.parameters()]
        mean = [old.lerp(new, 1 - 0.9) for old, new in zip(mean, present, strict=True)] if mean else present
        graph(x)
    with graph.ema_weights():
        assert_same(mean, [item.detach() for item in second.parameters()])


def two_optimizers(rank: int) -> None:
    """Each has a part of the parameters; one is stepped by build() itself."""

    class Two(mg.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            rest = [p for name, p in model.module.named_parameters() if not name.startswith("first.")]
            second = torch.optim.SGD(rest, lr=0.1)
            self.add_optimizer(torch.optim.AdamW(model.module.first.parameters(), lr=0.01))
            self.add_optimizer(second, manual=True)
            self.second = second

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = plain_body(self.model, x)
            self.second.step()
            return loss

    first, second = pair(rank)
    graph = Two(second)
    rest = [p for name, p in first.module.named_parameters() if not name.startswith("first.")]
    eager = [torch.optim.AdamW(first.module.first.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1)]
    for _ in range(2):
        x = torch.randn(4, 4) + rank
        graph(x)
        first.zero_grad()
        plain_body(first, x)
        for optimizer in eager:
            optimizer.step()
    assert_same(state_of(first), state_of(second))


def nonfinite(rank: int) -> None:
    """What one rank finds, all raise, and all keep their state."""
    _, model = pair(rank)
    graph = NetStep(model, plain_body)
    graph.config.detect_nonfinite()
    graph(torch.randn(4, 4))
    before = state_of(model)
    x = torch.randn(4, 4)
    if rank:
        x[0, 0] = float("nan")
    with pytest.raises(mg.NonfiniteError):
        graph(x)
    assert_same(before, state_of(model))
    graph(torch.randn(4, 4))


def eager_and_verify(rank: int) -> None:
    """The reference of a graph is the eager step of all ranks, with a wrapper and without."""
    torch.manual_seed(rank)
    base = Net()
    for wrap, configure in ((DistributedDataParallel, as_it_is), (as_it_is, parallel)):
        for steps in (1, 2):
            graph = NetStep(wrap(copy.deepcopy(base)), plain_body)
            configure(graph)
            graph.config.set_gradient_accumulation_steps(steps)
            x = torch.randn(4, 4) + rank
            graph(x)
            report = graph.verify(x)
            assert report.ok, str(report)


def same_program(rank: int) -> None:
    """Text and digest do not depend on the rank; the first build names its collectives."""

    dist.new_group([0])  # torch counts the groups of each process
    own = dist.new_group([0, 1])
    _, model = pair(rank, process_group=own)
    graph = NetStep(model, plain_body)
    graph(torch.randn(4, 4))
    digests: list[Any] = [None, None]
    dist.all_gather_object(digests, graph.builds[0].program.digest)
    assert digests[0] == digests[1]
    assert "'monograph/group'" in graph.show()
    assert "all_reduce" in graph.show()


def collectives(graph: mg.Graph) -> list[str]:
    """The names of the collectives of the last build, in order."""
    return [str(op).split(".")[1] for op, _ in calls_in_order(graph.builds[-1].program)]


def few_collectives(rank: int) -> None:
    """All gradients are one sum, if they are few bytes, and so are all buffers."""
    graph = check(rank)
    assert collectives(graph) == ["broadcast", "all_reduce"]


def no_sync_outside(rank: int) -> None:
    """`no_sync()` around a call counts: there is another build."""
    _, model = pair(rank, **OWN_BUFFERS)
    graph = NetStep(model, plain_body)
    x = torch.randn(4, 4)
    graph(x)
    with model.no_sync():
        graph(x)
    assert "require_backward_grad_sync" in str(graph.builds[1].reason)
    assert collectives(graph) == []
    graph(x)
    assert len(graph.builds) == 2


def hooked(rank: int) -> None:
    _, model = pair(rank)
    model.register_comm_hook(None, lambda _state, bucket: None)
    with pytest.raises(
        mg.DistributedError, match="model is wrapped by DistributedDataParallel with a communication hook"
    ):
        NetStep(model, plain_body)(torch.randn(4, 4))


def both(rank: int) -> None:
    _, model = pair(rank)
    graph = NetStep(model, plain_body)
    graph.config.enable_data_parallel()
    with pytest.raises(mg.DistributedError, match="which DistributedDataParallel wraps"):
        graph(torch.randn(4, 4))


def in_place_collective(rank: int) -> None:
    """What torch.distributed does in place is refused by name."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = plain_body(model, x).detach().clone()
        dist.all_reduce(loss)
        return loss

    _, model = pair(rank)
    with pytest.raises(mg.CaptureError, match="allreduce_"):
        NetStep(model, body)(torch.randn(4, 4))


def own_collective(rank: int) -> None:
    """A functional collective of the user's is an op of the step."""
    import torch.distributed._functional_collectives as functional

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(plain_body(model, x).detach(), "sum", dist.group.WORLD)

    graph = check(rank, body)
    assert collectives(graph) == ["broadcast", "all_reduce", "all_reduce"]


def warnings_of(graph: mg.Graph) -> list[str]:
    """What is said in the first step of a graph."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("monograph").addHandler(handler)
    try:
        graph(torch.randn(4, 4))
    finally:
        logging.getLogger("monograph").removeHandler(handler)
    return found


def alone(rank: int) -> None:
    """A step that shares nothing with the others is worth a warning."""
    torch.manual_seed(rank)
    said = "there are 2 processes, and each trains by itself"
    assert any(said in text for text in warnings_of(NetStep(Net(), plain_body)))
    _, model = pair(rank)
    past = NetStep(model, lambda model, x: plain_body(model.module, x))
    why = f"{said}: build() runs what model wraps, and not model itself"
    assert any(why in text for text in warnings_of(past))
    assert not any(said in text for text in warnings_of(NetStep(model, plain_body)))
    with model.no_sync():
        assert not any(said in text for text in warnings_of(NetStep(model, plain_body)))


def of_one_name(rank: int) -> None:
    """A graph that has no build says so to the others of its own, and not to those of a class that has its name."""

    def named(body: Callable[..., torch.Tensor]) -> mg.Graph:
        class Named(NetStep):
            pass

        return Named(Net(), body)

    def failing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no build")

    torch.manual_seed(0)
    batch = torch.randn(4, 4)
    with pytest.raises(ValueError, match="no build"):
        named(failing)(batch)
    graph = named(plain_body)
    graph.config.enable_data_parallel()
    assert graph(batch).isfinite()


def compiled(rank: int) -> None:
    """Compiled steps are as near as they promise."""
    made = WORKLOADS["gpt"](smoke=True)
    torch.manual_seed(0)
    base = made.make_model()
    sides = []
    for _ in range(2):
        model = DistributedDataParallel(copy.deepcopy(base))
        sides.append(Trained(model, OPTIMIZERS["sgd"](model.parameters())))
    graph = Step(sides[1], made.loss, backend="inductor")
    batch = made.make_batch(torch.Generator().manual_seed(rank))
    for _ in range(2):
        torch.testing.assert_close(eager_step(sides[0], made.loss, batch), graph(*batch).detach())
    for expected, got in zip(sides[0].model.parameters(), sides[1].model.parameters(), strict=True):
        torch.testing.assert_close(expected, got)


QUICK: dict[str, Case] = {
    "wrapped mlp": partial(_wrapped, workload="mlp", optimizer="adamw", backend="exact"),
    "plain gpt clipped": partial(_plain, workload="gpt", optimizer="adamw", clip=0.5),
    **{
        case.__name__: case
        for case in (
            *(two_forwards, two_backwards, unsynchronised, accumulated, kept, unused_found, unused_refused),
            *(other_sizes, ignoring, scaled, averaged, two_optimizers, nonfinite, eager_and_verify),
            *(same_program, few_collectives, no_sync_outside, hooked, both, in_place_collective),
            *(own_collective, alone, of_one_name),
        )
    },
}
SWEEP: dict[str, Case] = {
    f"{kind} {workload} {optimizer} {backend}": partial(
        case, workload=workload, optimizer=optimizer, backend=backend
    )
    for backend, workloads in _ON.items()
    for workload in workloads
    for kind, case in (("wrapped", _wrapped), ("plain", _plain))
    for optimizer in ("adamw", "sgd")
} | {"compiled": compiled}


@pytest.mark.every_case
@pytest.mark.quick
@pytest.mark.parametrize("case", QUICK)
def test_a_graph_does_as_the_wrapper(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", SWEEP)
def test_training_is_that_of_eager_mode(case: str, sweep: Wrong) -> None:
    assert_right(case, sweep)
