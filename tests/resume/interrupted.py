"""The same trainings as graphs, in processes that end in the middle: `python -m tests.resume.interrupted ...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.resume.workloads import (
    EMA_DECAY,
    MICRO_BATCHES,
    WORKLOADS,
    Setup,
    gan_losses,
    next_token_loss,
)
from tests.support.threads import set_threads

SAVED_AT = 3  # steps


class Classify(mg.Graph):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model = setup.models["model"]
        self.add_optimizer(setup.optimizers["model"], lr_sch=setup.schedulers.get("model"))
        if setup.loader is not None:
            self.register_state("loader", setup.loader)

    def build(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


class Half(Classify):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.config.enable_amp(dtype=torch.float16)
        self.set_grad_scaler(setup.scaler)
        self.add_ema(self.model, EMA_DECAY)

    def build(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


class Language(mg.Graph):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model = setup.models["model"]
        self.add_optimizer(setup.optimizers["model"], lr_sch=setup.schedulers["model"])
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)

    def build(self, tokens):
        loss = next_token_loss(self.model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return loss


class Contest(mg.Graph):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.maker, self.judge = setup.models["maker"], setup.models["judge"]
        for name, optimizer in setup.optimizers.items():
            self.add_optimizer(optimizer, manual=True)
            setattr(self, f"{name}_optimizer", optimizer)

    def build(self, real, _labels):
        return gan_losses(self.maker, self.judge, self.maker_optimizer, self.judge_optimizer, real)


GRAPHS: dict[str, type[mg.Graph]] = {
    "mobilenet": Classify,
    "gpt": Language,
    "gan": Contest,
    "fp16": Half,
    "loader": Classify,
}


def made(name: str) -> tuple[Setup, mg.Graph]:
    setup = WORKLOADS[name].make()
    return setup, GRAPHS[name](setup)  # type: ignore[call-arg]


def first_half(name: str, checkpoint: Path) -> None:
    """Train, save, train on, and end as a machine that loses its power."""
    setup, graph = made(name)
    torch.manual_seed(1)
    batches = WORKLOADS[name].batches(setup)
    for _ in range(SAVED_AT):
        graph(*next(batches))
    mg.save(graph.state_dict(), checkpoint)
    graph(*next(batches))
    os.kill(os.getpid(), signal.SIGKILL)


def second_half(name: str, checkpoint: Path, results: Path, *, steps: int) -> None:
    """A new process: load, train on, and write down every step."""
    setup, graph = made(name)
    torch.manual_seed(99)
    graph.load_state_dict(mg.load(checkpoint))
    batches = WORKLOADS[name].batches(setup)
    if setup.loader is None:
        batches = islice(batches, SAVED_AT, None)
    trail = []
    for batch in islice(batches, steps):
        losses = graph(*batch)
        trail.append({"losses": losses.detach().clone(), **setup.state(), "average": averaged(graph)})
    torch.save(trail, results)


def averaged(graph: mg.Graph) -> dict[str, Any] | None:
    average = graph.state_dict().get("ema.model")
    return None if average is None else {key: tensor.clone() for key, tensor in average.items()}


# --- factories for `monograph verify --resume` ------------------------------------------------------------------------


def _proof(name: str) -> tuple[mg.Graph, Any]:
    setup, graph = made(name)
    torch.manual_seed(1)
    return graph, setup.loader if setup.loader is not None else _Batches(name, setup)


class _Batches:
    def __init__(self, name: str, setup: Setup) -> None:
        self._name, self._setup = name, setup

    def __iter__(self) -> Iterator[Any]:
        return WORKLOADS[self._name].batches(self._setup)


def prove_mobilenet() -> Any:
    return _proof("mobilenet")


def prove_gpt() -> Any:
    return _proof("gpt")


def prove_gan() -> Any:
    return _proof("gan")


def prove_fp16() -> Any:
    return _proof("fp16")


def prove_loader() -> Any:
    return _proof("loader")


if __name__ == "__main__":
    set_threads()
    half, workload, *paths = sys.argv[1:]
    if half == "first":
        first_half(workload, Path(paths[0]))
    else:
        second_half(workload, Path(paths[0]), Path(paths[1]), steps=int(paths[2]))
