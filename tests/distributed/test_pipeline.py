"""Stages of a model on several ranks: bit for bit what one process computes that takes the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.distributed.processes import on_ranks
from tests.distributed.training import Case, assert_right, run_cases
from tests.support import assert_same

MICRO_BATCHES = 4


class Tied(nn.Module):
    """A stack of layers whose head is its embedding, with a value that stages in between do not read."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(depth))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embedding(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.linear(self.norm(hidden + first), self.embedding.weight)


class Images(nn.Module):
    """Convolutions with running statistics, in a layout that a transfer has to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU6())
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(memory_format=torch.channels_last))
        return self.head(self.body(x).transpose(2, 3).mean((2, 3)))


@dataclass(frozen=True)
class Task:
    """A model, the stage of each of its modules, and its batches."""

    make: Callable[[], nn.Module]
    stages: tuple[tuple[str, int], ...]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def _words(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2 * MICRO_BATCHES, 3)
    return torch.randint(11, shape, generator=generator), torch.randint(11, shape, generator=generator)


def _pictures(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    rows = 2 * MICRO_BATCHES
    return torch.randn(rows, 3, 6, 4, generator=generator), torch.randint(5, (rows,), generator=generator)


def tied(num_stages: int) -> Task:
    """As many layers as stages; the embedding is in the first stage, the norm in the last."""
    layers = [(f"layers.{index}", index) for index in range(num_stages)]
    stages = (("embedding", 0), *layers, ("norm", num_stages - 1))
    return Task(lambda: Tied(num_stages), stages, _words)


IMAGES = Task(Images, (("stem", 0), ("body", 1), ("head", 1)), _pictures)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


@dataclass(frozen=True)
class Extras:
    """What a step does besides."""

    clip: float = 0.0
    scaled: bool = False
    averaged: bool = False
    infinite_in: tuple[int, int] | None = None  # of a step the micro-batch whose loss is
    backend: str = "aten"


def loss_of(output: torch.Tensor, target: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten()) * factor.mean()


def place(block: Any, stages: tuple[tuple[str, int], ...]) -> None:
    """Set the stages of modules inside of a block."""
    for path, stage in stages:
        inner = block
        for name in path.split("."):
            inner = inner[int(name)] if name.isdigit() else getattr(inner, name)
        inner.to(mg.GraphModule).set_stage(stage)


class Step(mg.Graph):
    def __init__(self, task: Task, model: nn.Module, optimizer: Any, schedule: str, extras: Extras) -> None:
        super().__init__()
        self.model, self.extras = model, extras
        self.add_optimizer(optimizer)
        place(self.model, task.stages)
        if extras.scaled:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        if extras.averaged:
            self.add_ema(self.model, 0.5)
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.set_pipeline_schedule(schedule)
        self.config.backend(extras.backend)

    def build(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> Any:
        output = self.model(x)
        loss = loss_of(output, y, factor)
        loss.backward()
        norm = None
        if self.extras.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.extras.clip)
        return {"loss": loss, "output": output, "norm": norm}


class Eager:
    """The same by torch alone, in one process."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, extras: Extras) -> None:
        self.model, self.optimizer, self.extras = model, optimizer, extras
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=extras.scaled)
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        self.norm: Any = None

    def __call__(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> dict[str, Any]:
        self.optimizer.zero_grad()
        losses, outputs = [], []
        for rows in zip(*(item.chunk(MICRO_BATCHES) for item in (x, y, factor)), strict=True):
            output = self.model(rows[0])
            loss = loss_of(output, *rows[1:])
            self.scaler.scale(loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
            outputs.append(output.detach())
        norm = None
        if self.extras.clip:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.extras.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.average.update_parameters(self.model)
        return {"loss": torch.stack(losses), "output": torch.cat(outputs), "norm": norm}


def own_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stages: tuple[tuple[str, int], ...],
    mine: set[int],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a step changes of the modules in these stages."""
    for path, stage in stages:
        if stage not in mine:
            continue
        module = model.get_submodule(path)
        for name, tensor in module.state_dict().items():
            yield f"{path}.{name}", tensor
        for name, parameter in module.named_parameters():
            for key, entry in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
                if isinstance(entry, torch.Tensor):
                    yield f"{path}.{name}/{key}", entry


def stages_of(rank: int, ranks: int, num_stages: int, schedule: str) -> set[int]:
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return {rank, num_stages - 1 - rank}
    return set(range(rank, num_stages, ranks))


def compare(
    task: Task, optimizer: str, schedule: str, rank: int, extras: Extras | None = None, *, steps: int = 3
) -> Step:
    """Train both ways from the same weights, with the same batches; each rank looks at its own stages."""
    extras = extras or Extras()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = task.make()
    base = copy.deepcopy(model)
    own = OPTIMIZERS[optimizer](model.parameters())
    eager = Eager(base, OPTIMIZERS[optimizer](base.parameters()), extras)
    step = Step(task, model, own, schedule, extras)
    num_stages = 1 + max(stage for _, stage in task.stages)
    mine = stages_of(rank, ranks, num_stages, schedule)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    generator = torch.Generator().manual_seed(7)
    for index in range(steps):
        x, y = task.batch(generator)
        factor = torch.ones(MICRO_BATCHES)
        if extras.infinite_in is not None and extras.infinite_in[0] == index:
            factor[extras.infinite_in[1]] = torch.inf
        expected, found = eager(x, y, factor), step(x, y, factor)
        assert_same(expected["loss"], found["loss"].detach(), f"loss {index}")
        assert_same(expected["norm"], found["norm"], f"norm {index}")
        if num_stages - 1 in mine:
            assert_same(expected["output"], found["output"].detach(), f"output {index}")
        else:
            assert found["output"].shape == (0, *expected["output"].shape[1:])
        wanted = dict(own_state(base, eager.optimizer, task.stages, mine))
        assert_same(wanted, dict(own_state(model, own, task.stages, mine)), f"step {index}")
        if extras.averaged:
            with step.ema_weights():
                average = eager.average.module
                wanted = dict(own_state(average, None, task.stages, mine))
                assert_same(wanted, dict(own_state(model, None, task.stages, mine)), f"average {index}")
    others = {path for path, stage in task.stages if stage not in mine}
    for name, item in model.state_dict().items():
        if any(name.startswith(f"{path}.") for path in others):
            assert_same(before[name], item, f"{name} belongs to another rank")
    inputs = [port.path for port in step.builds[0].program.inputs]
    assert not [path for path in inputs if any(f"model.{other}." in path for other in others)]
    assert len(step.builds) == 1, step.explain()
    return step


EVERY = Extras(clip=0.3, scaled=True, averaged=True, infinite_in=(1, 2))


def _two_stages(schedule: str, optimizer: str, extras: Extras | None = None) -> Case:
    return lambda rank: _no_more(compare(tied(2), optimizer, schedule, rank, extras))


def _four_stages(schedule: str, optimizer: str = "adamw", extras: Extras | None = None) -> Case:
    return lambda rank: _no_more(compare(tied(4), optimizer, schedule, rank, extras))


def _no_more(step: Step) -> None:
    """Nothing is left that somebody has begun and nobody waits for."""
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


CASES: dict[str, Case] = {
    "1f1b sgd": _two_stages("1F1B", "sgd"),
    "gpipe sgd": _two_stages("GPipe", "sgd"),
    "1f1b adamw, everything": _two_stages("1F1B", "adamw", EVERY),
    "gpipe sgd, everything": _two_stages("GPipe", "sgd", EVERY),
    "1f1b foreach, everything": _two_stages("1F1B", "foreach", EVERY),
    "1f1b fused": _two_stages("1F1B", "fused", Extras(clip=0.3)),
    "images": lambda rank: _no_more(compare(IMAGES, "sgd", "1F1B", rank)),
    "interleaved": _four_stages("Interleaved1F1B"),
    "breadth first": _four_stages("LoopedBFS"),
    "zero bubble": _four_stages("InterleavedZeroBubble"),
    "zero bubble v": _four_stages("ZBVZeroBubble"),
    "dual pipe v": _four_stages("DualPipeV", extras=EVERY),
    "compiled exactly": _two_stages("1F1B", "adamw", Extras(clip=0.3, backend="exact")),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return on_ranks(run_cases, __name__, "CASES")


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_equals_one_process(case: str, found: list[dict[str, str]]) -> None:
    assert_right(case, found)
