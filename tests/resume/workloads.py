"""Five ways to train, in plain PyTorch: what an interrupted run must go on with, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from monograph.cli.demo import load_example

TOTAL = 6  # steps
MICRO_BATCHES = 4
EMA_DECAY = 0.9
Batch = tuple[torch.Tensor, ...]


@dataclass
class Setup:
    """What trains: modules, optimizers and what goes with them, by name."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    schedulers: dict[str, Any] = field(default_factory=dict)
    scaler: torch.amp.GradScaler | None = None
    average: AveragedModel | None = None
    loader: StatefulDataLoader[Any] | None = None

    def state(self) -> dict[str, Any]:
        """Copies of everything that a step changes."""
        found: dict[str, Any] = {
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": None if self.average is None else dict(self.average.state_dict()),
            "rng": torch.get_rng_state(),
        }
        return copy.deepcopy(found)


@dataclass(frozen=True)
class Workload:
    """`step` is the plain step; it gives the losses. `batches` are endless, and the same each time."""

    make: Callable[[], Setup]
    step: Callable[..., torch.Tensor]
    batches: Callable[[Setup], Iterator[Batch]]


def digits(batch: int, *shape: int, classes: int = 10) -> Callable[[Setup], Iterator[Batch]]:
    """Made-up images and labels."""

    def batches(_setup: Setup) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(11)
        while True:
            yield (
                torch.randn(batch, *shape, generator=generator),
                torch.randint(classes, (batch,), generator=generator),
            )

    return batches


# --- MobileNetV2, SGD, cosine, dropout -------------------------------------------------------------------------------


def make_mobilenet() -> Setup:
    torch.manual_seed(0)
    model = load_example("models/mobilenet_v2").MobileNetV2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Setup({"model": model}, {"model": optimizer}, {"model": CosineAnnealingLR(optimizer, TOTAL)})


def step_mobilenet(setup: Setup, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer = setup.optimizers["model"]
    optimizer.zero_grad()
    loss = F.cross_entropy(setup.models["model"](x), y)
    loss.backward()
    optimizer.step()
    setup.schedulers["model"].step()
    return loss.detach()


# --- GPT, AdamW, OneCycle, accumulation, clipping -----------------------------------------------------------------------


def make_gpt() -> Setup:
    torch.manual_seed(0)
    model = load_example("models/gpt").GPT(64, context=16, width=32, num_layers=2, num_heads=2, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=TOTAL + 1)
    return Setup({"model": model}, {"model": optimizer}, {"model": scheduler})


def next_token_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step_gpt(setup: Setup, tokens: torch.Tensor) -> torch.Tensor:
    model, optimizer = setup.models["model"], setup.optimizers["model"]
    optimizer.zero_grad()
    losses = []
    for micro in tokens.chunk(MICRO_BATCHES):
        loss = next_token_loss(model, micro)
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    setup.schedulers["model"].step()
    return torch.stack(losses)


def gpt_batches(_setup: Setup) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(11)
    while True:
        yield (torch.randint(64, (8, 17), generator=generator),)


# --- a GAN with two optimizers -------------------------------------------------------------------------------------------


def make_gan() -> Setup:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    judge = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "maker": torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        "judge": torch.optim.RMSprop(judge.parameters(), lr=1e-3),
    }
    return Setup({"maker": maker, "judge": judge}, optimizers)


def gan_losses(maker: Any, judge: Any, make_optimizer: Any, judge_optimizer: Any, real: torch.Tensor) -> Any:
    fake = maker(torch.randn(real.shape[0], 3))
    judge_loss = fooled(judge(real), 1.0) + fooled(judge(fake.detach()), 0.0)
    judge_optimizer.zero_grad()
    judge_loss.backward()
    judge_optimizer.step()
    make_loss = fooled(judge(fake), 1.0)
    make_optimizer.zero_grad()
    make_loss.backward()
    make_optimizer.step()
    return torch.stack([judge_loss, make_loss])


def fooled(scores: torch.Tensor, target: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def step_gan(setup: Setup, real: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    models, optimizers = setup.models, setup.optimizers
    losses = gan_losses(models["maker"], models["judge"], optimizers["maker"], optimizers["judge"], real)
    return losses.detach()


# --- fp16, dynamic scaler, skipped steps, averaged weights -----------------------------------------------------------------


def make_fp16() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    return Setup({"model": model}, {"model": optimizer}, scaler=scaler, average=average)


def step_fp16(setup: Setup, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer, scaler = setup.optimizers["model"], setup.scaler
    assert scaler is not None
    assert setup.average is not None
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(setup.models["model"](x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(setup.models["model"].parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    setup.average.update_parameters(setup.models["model"])
    return loss.detach()


def fp16_batches(setup: Setup) -> Iterator[Batch]:
    """Every second batch, from the second on, has gradients beyond all bounds: its step is skipped."""
    for index, (x, y) in enumerate(digits(8, 12)(setup)):
        if index % 2:
            x[0] = float("inf")
        yield x, y


# --- a loader in the middle of an epoch ----------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[Batch]):
    """Twenty rows: five batches make an epoch."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.tensor(index % 3)


def make_loaded() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(Numbers(), batch_size=4, shuffle=True)
    return Setup({"model": model}, {"model": optimizer}, loader=loader)


def step_loaded(setup: Setup, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer = setup.optimizers["model"]
    optimizer.zero_grad()
    loss = F.cross_entropy(setup.models["model"](x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def epochs(setup: Setup) -> Iterator[Batch]:
    assert setup.loader is not None
    while True:
        yield from setup.loader


WORKLOADS = {
    "mobilenet": Workload(make_mobilenet, step_mobilenet, digits(4, 3, 32, 32)),
    "gpt": Workload(make_gpt, step_gpt, gpt_batches),
    "gan": Workload(make_gan, step_gan, digits(6, 4)),
    "fp16": Workload(make_fp16, step_fp16, fp16_batches),
    "loader": Workload(make_loaded, step_loaded, epochs),
}


def plain_run(name: str) -> list[dict[str, Any]]:
    """The uninterrupted run: the losses and the whole state after each step."""
    workload = WORKLOADS[name]
    setup = workload.make()
    torch.manual_seed(1)
    batches = workload.batches(setup)
    return [{"losses": workload.step(setup, *next(batches)).clone(), **setup.state()} for _ in range(TOTAL)]
