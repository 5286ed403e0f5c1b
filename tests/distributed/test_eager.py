"""A step in eager mode of parameters in parts is the step of the graph, and `verify()` finds a step that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.capture.step import inputs as capture_inputs
from monograph.distributed import gather
from monograph.internals.internals import internals_of
from tests.distributed.test_sharded import Net as Parts
from tests.distributed.test_sharded import mesh_of, sharded
from tests.distributed.test_zero import Net, adamw, whole
from tests.distributed.training import Case, Wrong, assert_right, local
from tests.support import assert_same

Make = Callable[[Any], torch.optim.Optimizer]
Configure = Callable[[mg.Graph], Any]


class Step(mg.Graph):
    """A step of a model, with what a case asks for."""

    def __init__(
        self,
        model: nn.Module,
        stage: int | None,
        make: Make = adamw,
        configure: Configure = lambda _step: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(make(model.parameters()))
        self.config.backend("aten")
        if stage:
            self.config.enable_zero(stage=stage, shard_min_size=8)
        elif stage == 0:
            self.config.enable_data_parallel()
        configure(self)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of all state, of what is in parts those of this process."""
        found = {name: local(item).clone() for name, item in self.model.to(nn.Module).state_dict().items()}
        (registered,) = internals_of(self).owned().optimizers
        for index, entries in enumerate(registered.optimizer.state.values()):
            found |= {f"{index}/{name}": local(item).clone() for name, item in entries.items()}
        for name, parameter in self.model.to(nn.Module).named_parameters():
            if parameter.grad is not None:
                found[f"{name}.grad"] = local(parameter.grad).clone()
        return found


def alike(
    rank: int,
    stage: int | None,
    *,
    make: Make = adamw,
    configure: Configure = lambda _step: None,
    model: Callable[[], nn.Module] = Net,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    kind: type[Step] = Step,
    rows: int = 4,
    width: int = 6,
    x_of: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, _index: x,
) -> None:
    """Steps of the graph and in eager mode: the same results and state; `verify()` agrees and changes nothing."""
    torch.manual_seed(rank)  # all begin with the parameters of the first process
    base = model()
    ours, other = (kind(wrap(copy.deepcopy(base)), stage, make, configure) for _ in range(2))
    batches = torch.Generator().manual_seed(rank)
    for index in range(3):
        x = x_of(torch.randn(rows, width, generator=batches), index)
        for step in [other] * (index == 1) + [ours] * (index == 2):
            before = step.values()
            report = step.verify(x)
            assert report.ok, f"step {index}: {report}"
            assert_same(before, step.values(), f"verify {index}")
        results = [whole(run(x)) for run in (ours, other if index == 2 else other.eager)]
        assert_same(*results, f"result {index}")
        assert_same(ours.values(), other.values(), f"step {index}")
    assert [len(step.builds) for step in (ours, other)] == [1, 1], other.explain()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Clipped(Step):
    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class Shrunk(Step):
    """Changes parameters, and reads them."""

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        return loss + self.model(x).sum().detach()


class Held(Step):
    """Clips by parameters that it has found before there was any build; at stage 3 these are others then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held = list(self.model.to(nn.Module).parameters())

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.held, 0.1)
        return loss


class Convolved(nn.Module):
    """Weights in the order of images, which stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 8, 3, padding=1)
        self.last = nn.LSTM(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=torch.channels_last)
        found: torch.Tensor = self.last(self.first(x).mean((2, 3))[None])[0]
        return found


def _scaled(step: mg.Graph) -> None:
    step.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2))


def scaled(rank: int, stage: int) -> None:
    """An infinity on one rank lets all skip."""

    def spoiled(x: torch.Tensor, index: int) -> torch.Tensor:
        return x * float("inf") if rank and index == 1 else x

    alike(rank, stage, configure=_scaled, x_of=spoiled)
    step = Step(Net(), stage, configure=_scaled)
    report = step.verify(
        torch.ones(4, 6) * float("inf")
    )  # the first step, before which optimizers have no state
    assert report.ok, report


def accumulated(rank: int, stage: int) -> None:
    def configure(step: mg.Graph) -> None:
        step.config.set_gradient_accumulation_steps(2)

    alike(rank, stage, configure=configure, rows=8, kind=Clipped)


def averaged(rank: int, stage: int) -> None:
    def configure(step: Any) -> None:
        step.add_ema(step.model.to(nn.Module), 0.9)

    alike(rank, stage, configure=configure)


def compiled_first(rank: int, stage: int) -> None:
    """The graph goes on with the state that eager steps have made since it was compiled."""
    torch.manual_seed(0)
    base = Net()
    ours, other = (Step(copy.deepcopy(base), stage) for _ in range(2))
    batches = torch.Generator().manual_seed(rank)
    other.compile(torch.randn(4, 6))
    for run in (other.eager, other.eager, other):
        x = torch.randn(4, 6, generator=batches)
        assert_same(whole(ours(x)), whole(run(x)), "result")
        assert_same(ours.values(), other.values(), "state")
    assert len(other.builds) == 1, other.explain()


def kept(rank: int, stage: int) -> None:
    alike(rank, stage, configure=lambda step: step.config.keep_gradients())


def _spoiled(mean_part: Callable[..., torch.Tensor], factor: int, *args: Any) -> torch.Tensor:
    return mean_part(*args) * factor


def wrong(rank: int, stage: int) -> None:
    """A mean of gradients that is a sum is found, and what one rank alone gets is found by all."""
    if not stage:
        return
    x = torch.randn(4, 6)
    step = Step(Net(), stage)
    with pytest.MonkeyPatch.context() as patch:
        for module in (gather, capture_inputs):
            patch.setattr(module, "mean_part", partial(_spoiled, gather.mean_part, 2))
        report = step.verify(x)
    assert not report.ok
    assert report.ranks == (0, 1)
    assert report.first is not None
    assert report.first.cause == "capture", report
    if stage < 3:
        return  # without optimizers all have all
    evaluation = Evaluation(Net(), stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_inputs, "gathered", partial(_spoiled, gather.gathered, 1 + rank))
        report = evaluation.verify(x)
    assert not report.ok
    assert report.ranks == (1,)
    assert (report.first is not None) is (rank == 1), report


class Evaluation(mg.Graph):
    """A step of which each rank has results of its own alone."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        self.model = model.eval()
        self.config.backend("aten")
        self.config.enable_zero(stage=stage, shard_min_size=8)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


CHECKS: dict[str, Callable[..., None]] = {
    "AdamW": alike,
    "fused": partial(alike, make=fused),
    "momentum": partial(alike, make=momentum),
    "clipped": partial(alike, kind=Clipped),
    "changed in build": partial(alike, kind=Shrunk),
    "held elsewhere": partial(alike, kind=Held),
    "other layouts": partial(alike, model=Convolved),
    "Adafactor": partial(
        alike, make=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1), kind=Clipped
    ),
    "scaled": scaled,
    "accumulated": accumulated,
    "averaged": averaged,
    "kept": kept,
    "compiled first": compiled_first,
    "wrong": wrong,
}


def in_parts(rank: int, *, steps: int = 1, **options: Any) -> None:
    """The reference of a module in parts is that with its own hooks."""

    def configure(step: mg.Graph) -> None:
        step.config.set_gradient_accumulation_steps(steps)

    kind = Step if steps > 1 else Clipped
    wrap = partial(sharded, rank, **options)
    alike(rank, None, model=Parts, wrap=wrap, kind=kind, configure=configure, rows=4 * steps, width=5)


def in_parts_of_modules(rank: int) -> None:
    """DTensors that go into forward are the same in eager mode."""

    def wrap(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh_of(rank), plan)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    alike(0, None, model=model, wrap=wrap, kind=Clipped)


def of_many(rank: int, stage: int) -> None:
    """Sums over four processes are judged by float64, since their bits depend on buckets; what is wrong is found."""
    torch.manual_seed(rank)
    step, x = Step(Net(), stage, momentum), torch.randn(4, 6)
    step(x)
    report = step.verify(x, steps=2)
    assert report.ok, report
    assert report.judged
    with pytest.MonkeyPatch.context() as patch:
        for module in (gather, capture_inputs):
            patch.setattr(module, "mean_part", partial(_spoiled, gather.mean_part, 2))
        report = Step(Net(), stage, momentum).verify(x)
    assert report.ok is (stage == 0), report
    assert report.ranks == ((0, 1, 2, 3) if stage else ())


def _cases(chosen: Callable[[str, int], bool]) -> dict[str, Case]:
    return {
        f"{name} at stage {stage}": partial(check, stage=stage)
        for name, check in CHECKS.items()
        for stage in (0, 1, 2, 3)
        if chosen(name, stage)
    }


_FEW = (("clipped", 2), ("accumulated", 1), ("wrong", 3))
QUICK = _cases(lambda name, stage: (name, stage) in _FEW)
LONG = _cases(lambda name, stage: (name, stage) not in _FEW) | {
    "in parts": in_parts,
    "in parts, micro-batches": partial(in_parts, steps=2),
    "in parts, cast": partial(in_parts, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "in parts of modules": in_parts_of_modules,
    "wrapped": partial(alike, stage=None, wrap=DistributedDataParallel, kind=Clipped),
}


FOUR: dict[str, Case] = {f"of many at stage {stage}": partial(of_many, stage=stage) for stage in (0, 1, 3)}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_a_step_in_eager_mode_is_that_of_the_graph(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", LONG)
def test_more_steps_in_eager_mode(case: str, long: Wrong) -> None:
    assert_right(case, long)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_sums_over_many_may_round(case: str, four: Wrong) -> None:
    assert_right(case, four)
