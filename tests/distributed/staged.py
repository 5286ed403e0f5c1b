"""Models in stages, trained by a pipeline on several ranks and by torch alone: in one process, or by those that have copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg
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


class Frozen(Tied):
    """One stage of two is not trained: it has no gradients."""

    def __init__(self, stage: int) -> None:
        super().__init__(2)
        self.head = nn.Linear(6, 11)
        first, last = (self.embedding, self.layers[0]), (self.layers[1], self.norm, self.head)
        for module in last if stage else first:
            module.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


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

    @property
    def num_stages(self) -> int:
        return 1 + max(stage for _, stage in self.stages)


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


def frozen(stage: int) -> Task:
    return Task(partial(Frozen, stage), (*tied(2).stages, ("head", 1)), _words)


IMAGES = Task(Images, (("stem", 0), ("body", 1), ("head", 1)), _pictures)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "radam": lambda parameters: torch.optim.RAdam(
        parameters, lr=0.05
    ),  # takes another branch at its sixth step
}


@dataclass(frozen=True)
class Extras:
    """What a step does besides."""

    clip: float = 0.0
    scaled: bool = False
    averaged: bool = False
    infinite_in: tuple[int, int] | None = None  # of a step the micro-batch whose loss is
    infinite_at: str = ""  # the parameter whose gradient alone is, by default all of them
    backend: str = "aten"
    autocast: bool = False
    checkpointed: bool = False
    on_meta: bool = False  # the modules of other ranks
    zero: int = 0  # over copies of the pipeline
    placed: tuple[tuple[int, ...], ...] = ()  # by stage the ranks


def loss_of(
    model: Any, output: torch.Tensor, target: torch.Tensor, factor: torch.Tensor, extras: Extras
) -> torch.Tensor:
    loss = F.cross_entropy(output.flatten(0, -2), target.flatten())
    if extras.infinite_at:
        return loss + model.get_parameter(extras.infinite_at).sum() * (factor.mean() - 1)
    return loss * factor.mean()


def place(block: Any, stages: tuple[tuple[str, int], ...], placed: tuple[tuple[int, ...], ...] = ()) -> None:
    """Set the stages of modules inside of a block, and by stage the ranks."""
    for path, stage in stages:
        inner = block
        for name in path.split("."):
            inner = inner[int(name)] if name.isdigit() else getattr(inner, name)
        placement = mg.distributed.placement("cpu", placed[stage]) if placed else None
        inner.to(mg.GraphModule).set_stage(stage, placement)


def moving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.7**step)


class Step(mg.Graph):
    def __init__(self, task: Task, model: nn.Module, optimizer: Any, schedule: str, extras: Extras) -> None:
        super().__init__()
        self.model, self.extras = model, extras
        self.add_optimizer(optimizer, lr_sch=moving(optimizer))
        place(self.model, task.stages, extras.placed)
        if extras.scaled:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        if extras.averaged:
            self.add_ema(self.model, 0.5)
        if extras.checkpointed:
            self.model.layers[0].to(mg.GraphModule).activation_checkpointing = True
        self.config.enable_amp(extras.autocast)
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.set_pipeline_schedule(schedule)
        self.config.backend(extras.backend)

    def build(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> Any:
        output = self.model(x)
        loss = loss_of(self.model, output, y, factor, self.extras)
        loss.backward()
        norm = None
        if self.extras.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.extras.clip)
        return {"loss": loss, "output": output, "norm": norm}


class Eager:
    """The same by torch alone, in one process; with a mesh each process of that trains a copy of the whole model."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, extras: Extras, mesh: Any = None
    ) -> None:
        self.model, self.optimizer, self.extras, self.mesh = model, optimizer, extras, mesh
        group = None if mesh is None else mesh.get_group()
        self.run: Any = model if group is None else DistributedDataParallel(model, process_group=group)
        self.group = group if extras.zero == 2 else None  # gradients of each micro-batch are averaged
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=extras.scaled)
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        self.scheduler = moving(optimizer)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> dict[str, Any]:
        self.optimizer.zero_grad()
        losses, outputs, sums = [], [], dict[str, torch.Tensor]()
        for buffer in () if self.group is None else self.model.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)
        for index, rows in enumerate(
            zip(*(item.chunk(MICRO_BATCHES) for item in (x, y, factor)), strict=True)
        ):
            is_last = index == MICRO_BATCHES - 1 and self.group is None
            with nullcontext() if is_last or self.run is self.model else self.run.no_sync():
                with torch.autocast("cpu", enabled=self.extras.autocast):
                    output = self.run(rows[0])
                    loss = loss_of(self.model, output, *rows[1:], self.extras)
                self.scaler.scale(loss / MICRO_BATCHES).backward()
            if self.group is not None:
                self._reduce(sums)
            losses.append(loss.detach())
            outputs.append(output.detach())
        for name, total in sums.items():
            self.model.get_parameter(name).grad = total
        norm = None
        if self.extras.clip:
            self.scaler.unscale_(self.optimizer)
            norm = self._norm()
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.extras.clip, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return {"loss": torch.stack(losses), "output": torch.cat(outputs), "norm": norm}

    def _norm(self) -> torch.Tensor:
        """That of all gradients; where processes update rows of them, it is put together from those of rows."""
        found: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        if self.extras.zero:
            found = [distribute_tensor(item, self.mesh, [Shard(0)]) for item in found]
        return whole(nn.utils.get_total_norm(found))

    def _reduce(self, sums: dict[str, torch.Tensor]) -> None:
        """Add the means of the gradients of a micro-batch."""
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            mean = parameter.grad
            dist.all_reduce(mean, group=self.group)
            mean /= self.group.size()
            sums[name] = sums[name] + mean if name in sums else mean
            parameter.grad = None


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
                    yield f"{path}.{name}/{key}", whole(entry)


def whole(item: Any) -> Any:
    """Of what processes have in parts all of it."""
    return item.full_tensor() if hasattr(item, "full_tensor") else item


def stages_of(rank: int, ranks: int, num_stages: int, schedule: str) -> set[int]:
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return {rank, num_stages - 1 - rank}
    return set(range(rank, num_stages, ranks))


def compare(
    task: Task,
    optimizer: str,
    schedule: str,
    rank: int,
    extras: Extras | None = None,
    *,
    steps: int = 3,
    builds: int = 1,
    mesh: Any = None,
) -> Step:
    """Train both ways from the same weights, with the same batches; each rank looks at its own stages.

    With a mesh of copies and stages each copy begins with other weights, and has batches of its own; `rank` is that among the stages.
    """
    extras = extras or Extras()
    ranks = dist.get_world_size() if mesh is None else mesh["pp"].size()
    place = 0 if mesh is None else mesh.get_local_rank("dp")
    torch.manual_seed(place)
    model = task.make()
    base = copy.deepcopy(model)
    num_stages = task.num_stages
    mine = stages_of(rank, ranks, num_stages, schedule)
    others = {path for path, stage in task.stages if stage not in mine}
    if extras.on_meta:
        for path in others:
            model.get_submodule(path).to("meta")
    own = OPTIMIZERS[optimizer](model.parameters())
    copies = None if mesh is None else mesh["dp"]
    eager = Eager(base, OPTIMIZERS[optimizer](base.parameters()), extras, copies)
    step = Step(task, model, own, schedule, extras)
    if mesh is not None:
        step.config.enable_data_parallel(mesh)
    if extras.zero:
        step.config.enable_zero(stage=extras.zero, shard_min_size=0)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    generator = torch.Generator().manual_seed(7 + place)
    for index in range(steps):
        x, y = task.batch(generator)
        factor = torch.ones(MICRO_BATCHES)
        if place == 0 and extras.infinite_in is not None and extras.infinite_in[0] == index:
            factor[extras.infinite_in[1]] = torch.inf
        expected, found = eager(x, y, factor), step(x, y, factor)
        assert_same(expected["loss"], found["loss"].detach(), f"loss {index}")
        assert_same(expected["norm"], whole(found["norm"]), f"norm {index}")
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
    for name, item in model.state_dict().items() if mesh is None else ():
        if not extras.on_meta and any(name.startswith(f"{path}.") for path in others):
            assert_same(before[name], item, f"{name} belongs to another rank")
    inputs = [port.path for port in step.builds[0].program.inputs]
    assert not [path for path in inputs if any(f"model.{other}." in path for other in others)]
    assert len(step.builds) == builds, step.explain()
    return step
