"""Four models that are deployed, and how each trains, in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from examples.models.gpt import GPT
from examples.models.mobilenet_v2 import MobileNetV2

BEFORE, AFTER = 2, 5  # steps before the model is saved, and behind


class LSTM(nn.Module):
    """Words in, a class out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.layers = nn.LSTM(12, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.output = nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        """Scores for each sentence."""
        return self.output(self.layers(self.embedding(words))[0][:, -1])


class Twice(nn.Sequential):
    """Two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Images in, images out, with a way around the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Twice(1, 4), Twice(4, 8), Twice(8, 4)
        self.wider = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.output = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        around = self.down(x)
        below = self.wider(self.middle(F.max_pool2d(around, 2)))
        return self.output(self.up(torch.cat([around, below], dim=1)))


@dataclass
class Setup:
    """A model with what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """How a model is made and trained; `batch(n)` is made-up data of n examples."""

    make: Callable[[], Setup]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch: Callable[[int, torch.Generator], Batch]
    clip: float | None = None


def make_mobilenet() -> Setup:
    """SGD with momentum and a cosine."""
    model = MobileNetV2(num_classes=10, first_stride=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Setup(model, optimizer, CosineAnnealingLR(optimizer, T_max=20))


def make_gpt() -> Setup:
    """AdamW with clipped gradients and one cycle."""
    model = GPT(vocabulary=30, context=12, width=32, num_layers=2, num_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Setup(model, optimizer, OneCycleLR(optimizer, max_lr=0.01, total_steps=20))


def make_lstm() -> Setup:
    """RMSprop with a warm-up before a cosine."""
    model = LSTM()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    warm_up, cosine = LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, T_max=10)
    return Setup(model, optimizer, SequentialLR(optimizer, [warm_up, cosine], milestones=[3]))


def make_unet() -> Setup:
    """Adam without a scheduler."""
    model = UNet()
    return Setup(model, torch.optim.Adam(model.parameters(), lr=0.01), None)


def images(size: int, channels: int, labels: bool) -> Callable[[int, torch.Generator], Batch]:
    """Images, with classes or with images as targets."""

    def batch(count: int, source: torch.Generator) -> Batch:
        x = torch.randn(count, channels, size, size, generator=source)
        if labels:
            return x, torch.randint(10, (count,), generator=source)
        return x, torch.randn(count, channels, size, size, generator=source)

    return batch


def words(vocabulary: int, length: int, classes: int | None) -> Callable[[int, torch.Generator], Batch]:
    """Words, with classes or with the next words as targets."""

    def batch(count: int, source: torch.Generator) -> Batch:
        x = torch.randint(vocabulary, (count, length), generator=source)
        if classes is None:
            return x, torch.randint(vocabulary, (count, length), generator=source)
        return x, torch.randint(classes, (count,), generator=source)

    return batch


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, over all words if there are several."""
    scores = model(x)
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


def image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean square of what differs."""
    return F.mse_loss(model(x), y)


WORKLOADS = {
    "mobilenet": Workload(make_mobilenet, class_loss, images(16, 3, labels=True)),
    "gpt": Workload(make_gpt, class_loss, words(30, 12, None), clip=1.0),
    "lstm": Workload(make_lstm, class_loss, words(20, 7, 5)),
    "unet": Workload(make_unet, image_loss, images(8, 1, labels=False)),
}


def batches(name: str) -> list[Batch]:
    """The data of every step."""
    source = torch.Generator().manual_seed(1)
    return [WORKLOADS[name].batch(4, source) for _ in range(BEFORE + AFTER)]


def inputs(name: str, count: int) -> Tensor:
    """Data to infer from."""
    return WORKLOADS[name].batch(count, torch.Generator().manual_seed(count))[0]


def plain_step(workload: Workload, setup: Setup, x: Tensor, y: Tensor) -> Tensor:
    """One step as anybody writes it."""
    setup.optimizer.zero_grad()
    loss = workload.loss(setup.model, x, y)
    loss.backward()
    if workload.clip is not None:
        nn.utils.clip_grad_norm_(setup.model.parameters(), workload.clip)
    setup.optimizer.step()
    if setup.scheduler is not None:
        setup.scheduler.step()
    return loss.detach()


def plain_results(name: str) -> dict[str, Any]:
    """What training without a break gives: the inference when it would be saved, then losses, and the state at the end."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    setup = workload.make()
    data = batches(name)
    for x, y in data[:BEFORE]:
        plain_step(workload, setup, x, y)
    setup.model.eval()
    with torch.no_grad():
        inferred = {count: setup.model(inputs(name, count)) for count in (1, 4, 6)}
    setup.model.train()
    losses = [plain_step(workload, setup, x, y) for x, y in data[BEFORE:]]
    state = copy.deepcopy({"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()})
    lr = setup.optimizer.param_groups[0]["lr"]
    return {"inferred": inferred, "losses": losses, **state, "lr": lr, "random": torch.get_rng_state()}
