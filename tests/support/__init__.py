"""What the tests share: bitwise comparison and plain training loops that do not know Monograph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_READS_THE_SAME = re.compile(
    r"changed from (?P<before>.+) to (?P=before)$|(?:is|has|strides|keys) (?P<got>.+); the graph was built for (?P=got)$"
)


def says_nothing(reason: str) -> bool:
    """True if the two sides of a reason for a build read the same."""
    return _READS_THE_SAME.search(reason) is not None or reason == "a guard failed"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have one dtype, one shape and the same bits: -0.0 is not 0.0, NaN is NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype.is_floating_point:
        kind = _BITS[a.element_size()]
        a, b = a.view(kind), b.view(kind)
    return torch.equal(a, b)


def assert_same(expected: Any, got: Any, path: str = "value") -> None:
    """Compare nested values bit for bit; the message names the path of the first difference."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{path}: expected a tensor, got {type(got)}"
        assert same_bits(expected, got), f"{path}: {expected} != {got}"
    elif isinstance(expected, Mapping):
        assert list(expected) == list(got), f"{path}: keys {list(expected)} != {list(got)}"
        for key in expected:
            assert_same(expected[key], got[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), f"{path}: {len(expected)} items != {len(got)}"
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert expected == got, f"{path}: {expected!r} != {got!r}"


@dataclass
class Side:
    """A model with what trains it, on one side of a comparison."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, cloned, the random state too."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
                for entries in self.optimizer.state.values()
            ],
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "rng": torch.get_rng_state(),
        }


def train_eagerly(
    side: Side,
    loss_of: Callable[..., torch.Tensor],
    batches: Iterable[tuple[Any, ...]],
    after: Callable[[int, torch.Tensor], None] = lambda _step, _loss: None,
    *,
    before_update: Callable[[nn.Module], None] = lambda _model: None,
) -> list[dict[str, Any]]:
    """The plain loop, and the state after each step; `loss_of(model, *batch)` is the forward with its loss.

    `before_update(model)` is called between backward and the optimizer: clipping.
    """
    trail = []
    for index, batch in enumerate(batches):
        side.optimizer.zero_grad()
        loss = loss_of(side.model, *batch)
        loss.backward()
        before_update(side.model)
        side.optimizer.step()
        if side.scheduler is not None:
            side.scheduler.step()
        after(index, loss)
        trail.append({"loss": loss.detach().clone(), **side.state()})
    return trail


def new_cache(folder: Path) -> str:
    """The folder as a cache that knows nothing but the code that all compiled steps share, which is slow to compile."""
    folder.mkdir(exist_ok=True)
    shared = Path(os.environ["MONOGRAPH_CACHE_DIR"], "shared")
    shared.mkdir(parents=True, exist_ok=True)
    (folder / "shared").symlink_to(shared, target_is_directory=True)
    return str(folder)
