"""The demo: one model trained eagerly and as graphs on the same batches, and compared bit by bit at each step."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import monograph as mg
from monograph.numerics.judge import differences

StepFunction = Callable[[Tensor, Tensor], Tensor]

PEAK_LEARNING_RATE = 3e-3
EVALUATION_BATCH = 512
EAGER = "eager"
FASTEST = "inductor"  # the backend that rounds otherwise


class Images(Protocol):
    """Images and labels, for training and held out."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Trainer:
    """A model, its optimizer, and the function that makes one training step."""

    model: nn.Module
    optimizer: Optimizer
    step: StepFunction

    @property
    def backend(self) -> str:
        """What ran the last step."""
        return self.step.backend if isinstance(self.step, mg.Graph) else EAGER


@dataclass(frozen=True)
class Outcome:
    """What one step gave: the loss, the state of the random numbers after it, the time it took, and what ran it."""

    loss: Tensor
    rng: Tensor
    seconds: float
    backend: str

    @property
    def has_to_be_eagers(self) -> bool:
        """True if eager's bits are promised."""
        return self.backend != FASTEST


@dataclass(frozen=True)
class GraphStep:
    """One step of a graph, and the first thing that differs from eager where nothing may."""

    outcome: Outcome
    difference: str | None


@dataclass(frozen=True)
class StepReport:
    """One step of all trainers."""

    eager: Outcome
    graphs: Mapping[str, GraphStep]


class TrainStep(mg.Graph):
    """Forward, loss, backward, update and schedule as one graph."""

    def __init__(
        self, model: nn.Module, loss_fn: nn.Module, optimizer: Optimizer, scheduler: LRScheduler
    ) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def graph_trainer(model: nn.Module, *, steps: int, swap_at: int | None = None) -> Trainer:
    """Train `model` with a Graph as it comes, or with the fastest code from a step on, compiled beside those before."""
    optimizer, scheduler = make_optimizer(model, steps=steps)
    graph = TrainStep(model, nn.CrossEntropyLoss(), optimizer, scheduler)
    if swap_at is not None:
        graph.config.backend(FASTEST, background=True, swap_at=swap_at)
    return Trainer(model, optimizer, graph)


def eager_trainer(model: nn.Module, *, steps: int) -> Trainer:
    """Train `model` with plain PyTorch."""
    optimizer, scheduler = make_optimizer(model, steps=steps)
    loss_fn = nn.CrossEntropyLoss()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Trainer(model, optimizer, step)


def make_optimizer(model: nn.Module, *, steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW whose learning rate and momentum change at each step."""
    optimizer = AdamW(model.parameters(), lr=PEAK_LEARNING_RATE)
    return optimizer, OneCycleLR(optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=steps)


def make_model(seed: int) -> nn.Module:
    """MobileNetV2 with one block for each of its stages, and the weights that belong to `seed`."""
    module = load_example("models/mobilenet_v2")
    torch.manual_seed(seed)
    model: nn.Module = module.MobileNetV2(
        stages=tuple(replace(stage, num_blocks=1) for stage in module.STAGES)
    )
    return model


def load_images(directory: Path | None) -> Images:
    """CIFAR-10 from `directory`, or without one the digits of scikit-learn."""
    module = load_example("data/images")
    images: Images = module.load_digits() if directory is None else module.load_cifar10(directory)
    return images


def batches(images: Images, *, steps: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` shuffled batches; each epoch drops its last images if they do not fill a batch."""
    generator = torch.Generator().manual_seed(seed)
    count = len(images.train_x)
    per_epoch = count // size
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(count, generator=generator)
        chosen = order[step % per_epoch * size :][:size]
        yield images.train_x[chosen], images.train_y[chosen]


def train_in_turn(
    eager: Trainer, graphs: Mapping[str, Trainer], data: Iterable[tuple[Tensor, Tensor]], *, seed: int
) -> Iterator[StepReport]:
    """Give each batch to all trainers, each with its own random numbers, and compare them after it."""
    begin = torch.Generator().manual_seed(seed).get_state()
    rngs = dict.fromkeys((EAGER, *graphs), begin)
    for x, y in data:
        expected = take_step(eager, x, y, rng=rngs[EAGER])
        taken = {name: take_step(graph, x, y, rng=rngs[name]) for name, graph in graphs.items()}
        rngs = {EAGER: expected.rng, **{name: outcome.rng for name, outcome in taken.items()}}
        everything = {"loss": expected.loss, "rng": expected.rng, **state(eager)}
        yield StepReport(
            expected,
            {
                name: GraphStep(outcome, first_difference(everything, outcome, graphs[name]))
                for name, outcome in taken.items()
            },
        )


def first_difference(expected: Mapping[str, Any], outcome: Outcome, trainer: Trainer) -> str | None:
    """The first thing in which a step is not eager's, if its bits have to be."""
    if not outcome.has_to_be_eagers:
        return None
    got = {"loss": outcome.loss, "rng": outcome.rng, **state(trainer)}
    found = next(differences(expected, got), None)
    return None if found is None else str(found)


def take_step(trainer: Trainer, x: Tensor, y: Tensor, *, rng: Tensor) -> Outcome:
    """Make one timed step that draws its random numbers from `rng`."""
    torch.set_rng_state(rng)
    start = perf_counter()
    loss = trainer.step(x, y)
    seconds = perf_counter() - start
    return Outcome(loss.detach(), torch.get_rng_state(), seconds, trainer.backend)


def state(trainer: Trainer) -> dict[str, Any]:
    """All that a step changes: parameters, buffers, the optimizer's state and its hyperparameters."""
    optimizer = trainer.optimizer.state_dict()
    entries: dict[str, Any] = {
        **dict(trainer.model.named_parameters()),
        **dict(trainer.model.named_buffers()),
    }
    for index, values in optimizer["state"].items():
        entries |= {f"optimizer state {index}: {name}": value for name, value in values.items()}
    for index, group in enumerate(optimizer["param_groups"]):
        entries |= {f"optimizer group {index}: {name}": value for name, value in group.items()}
    return entries


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of held-out images that the model names rightly."""
    was_training = model.training
    model.eval()
    pairs = zip(images.test_x.split(EVALUATION_BATCH), images.test_y.split(EVALUATION_BATCH), strict=True)
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    model.train(was_training)
    return correct / len(images.test_y)


def is_as_good(accuracy: float, expected: float, count: int) -> bool:
    """True if `count` images cannot tell an accuracy from the expected one: not three standard errors below it."""
    share = (accuracy + expected) / 2
    return accuracy >= expected - 3 * math.sqrt(2 * share * (1 - share) / count)


def load_example(name: str) -> ModuleType:
    """A module of the examples, loaded from its file, so that it need not be on the path."""
    qualified = f"monograph_examples.{name.replace('/', '.')}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    path = examples_folder() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(qualified, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module  # before it runs: dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def examples_folder() -> Path:
    """The examples: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "examples"
    return inside if inside.is_dir() else package.parent / "examples"
