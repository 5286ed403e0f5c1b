"""What the guards of one call cost, for three models under AdamW.

Run on one pinned core: `OMP_NUM_THREADS=1 taskset -c 1 .venv/bin/python -m benchmarks.guards`. The figure is the
minimum over many short runs of everything a call does besides running the program; `capture` is the CPU time of the
first step. Names of cases as arguments measure only these.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import monograph as mg
from monograph.internals.internals import internals_of


class TrainStep(mg.Graph):
    """A step of any model, whose result or its `loss` is a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))

    def build(self, *inputs: torch.Tensor) -> torch.Tensor:
        """One step."""
        found = self.model(*inputs)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        loss = loss.square().mean()
        loss.backward()
        return loss


class Configured(nn.Module):
    """A stack of blocks that asks its OmegaConf config in each forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width = config.model.width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.model.depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks as the config says."""
        for block in self.blocks:
            x = block(x)
            if self.config.model.activation == "relu":
                x = torch.relu(x)
            x = x * self.config.model.scale
        return x


@dataclass(frozen=True)
class Case:
    """A model and the arguments of its steps."""

    model: nn.Module
    args: tuple[Any, ...]


def stack() -> Case:
    """100 Linear layers: 200 parameters."""
    return Case(nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), (torch.randn(8, 4),))


def bert() -> Case:
    """A BERT of 12 narrow layers, with the config of transformers."""
    importlib.import_module(
        "tests.support.torchvision_ops"
    )  # transformers imports torchvision where it is installed
    from transformers import BertConfig, BertForSequenceClassification  # an optional dependency

    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    }
    config = BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)

    class Labelled(nn.Module):
        """Gives the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            """The loss of the model."""
            return self.bert(input_ids=ids, labels=labels).loss

    return Case(Labelled(), (torch.randint(0, 50, (2, 8)), torch.tensor([0, 1])))


def omegaconf() -> Case:
    """Eight layers that ask a DictConfig."""
    from omegaconf import OmegaConf  # an optional dependency

    config = OmegaConf.create(
        {
            "model": {"width": 4, "depth": 8, "activation": "relu", "scale": 0.5},
            "train": {"epochs": 3, "betas": [0.9, 0.99], "name": "run"},
        }
    )
    return Case(Configured(config), (torch.randn(8, 4),))


CASES: dict[str, Callable[[], Case]] = {"stack": stack, "bert": bert, "omegaconf": omegaconf}


def microseconds(function: Callable[[], object], runs: int = 100, repeats: int = 40) -> tuple[float, float]:
    """Minimum and median of the mean time of one call, in microseconds of CPU time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(runs):
            function()
        times.append((time.process_time() - start) / runs * 1e6)
    return min(times), statistics.median(times)


def measure(name: str, case: Case) -> None:
    """Print the parts of a call, in microseconds."""
    step = TrainStep(case.model)
    start = time.process_time()
    step(*case.args)
    first = time.process_time() - start
    for _ in range(2):
        step(*case.args)
    build, inside = step.builds[-1], internals_of(step)
    call = inside.read(case.args, {})
    parts: dict[str, Callable[[], object]] = {
        "guards": build.guards.hold,
        "guards, signature, key and binding": lambda: inside.build_for(
            inside.read(case.args, {}), case.args, {}
        ),
        "signature and key": lambda: inside.read(case.args, {}),
        "binding": lambda: build.executor.bind(call.leaves),
    }
    tensors = len(build.guards.tensors)
    print(f"{name}: {tensors} state tensors, {len(step.builds)} build, hold {build.guards.hold()}")
    print(f"  {'capture':36} {first:7.2f} s")
    for part, function in parts.items():
        low, middle = microseconds(function)
        print(f"  {part:36} min {low:7.1f} µs   median {middle:7.1f} µs", flush=True)


def main() -> None:
    """Measure and print."""
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        measure(name, CASES[name]())


if __name__ == "__main__":
    main()
