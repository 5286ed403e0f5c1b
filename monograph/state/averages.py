"""Exponential moving averages of weights, as part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from monograph.compat.distributed.tensors import part_of
from monograph.errors import DefinitionError

Decay = float | Callable[[int], float]


class Average:
    """The moving average of a module's parameters.

    As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update copies the
    parameters, each later one is `average.lerp_(parameter, 1 - decay)`. Buffers are those of the module.
    """

    def __init__(self, path: str, module: nn.Module, decay: Decay) -> None:
        self.path, self.module, self.decay = path, module, decay
        self.updates = 0
        self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        if not callable(decay):
            self._check(decay)

    def __getitem__(self, key: str) -> float:
        """The weight of the parameters in the next update: a number that a program reads before each step."""
        assert key == "weight"
        if not self.updates:
            return 1.0  # the first update is a copy
        decay = self.decay(self.updates) if callable(self.decay) else self.decay
        self._check(decay)
        return 1 - decay

    def _check(self, decay: object) -> None:
        if not isinstance(decay, (int, float)) or not 0.0 <= decay <= 1.0:
            raise DefinitionError(
                f"the decay of the average of {self.path} is {decay!r} at update {self.updates}",
                hint="a decay is a number from 0 to 1, or a function of the number of updates that gives one",
            )

    def parameters(self) -> list[torch.Tensor]:
        """The parameters in the order of the weights."""
        named = dict(self.module.named_parameters())
        if changed := {name for name in named.keys() | self.weights.keys() if not self._fits(name, named)}:
            raise DefinitionError(
                f"{self.path}.{min(changed)} is not as it was when the average of {self.path} began",
                hint="change modules and move them before add_ema()",
            )
        return [named[name] for name in self.weights]

    def _fits(self, name: str, named: Mapping[str, torch.Tensor]) -> bool:
        if name not in named or name not in self.weights:
            return False
        ours, theirs = self.weights[name], named[name]
        return (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)

    def _averaged(self) -> list[torch.Tensor]:
        return _parts(self.weights.values())

    def update(self) -> None:
        """One update in eager mode."""
        with torch.no_grad():
            if self.updates:
                torch._foreach_lerp_(self._averaged(), _parts(self.parameters()), self["weight"])
        self.finish(self.updates)

    def finish(self, updates: int) -> None:
        """Count an update that the step has made, `updates` being those before it. Twice is once."""
        if updates == 0:
            with torch.no_grad():
                torch._foreach_copy_(self._averaged(), _parts(self.parameters()))
        self.updates = updates + 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters have the values of the average; they stay the same objects."""
        parameters, averaged = _parts(self.parameters()), self._averaged()
        kept = [parameter.detach().clone() for parameter in parameters]
        try:
            with torch.no_grad():
                torch._foreach_copy_(parameters, averaged)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, kept)

    # --- the format of AveragedModel -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `AveragedModel.load_state_dict` takes."""
        averaged = {id(p): w for p, w in zip(self.parameters(), self.weights.values(), strict=True)}
        entries = self.module.state_dict(keep_vars=True)
        values = {f"module.{key}": averaged.get(id(item), item) for key, item in entries.items()}
        detached = {
            key: item.detach() if isinstance(item, torch.Tensor) else item for key, item in values.items()
        }
        return {"n_averaged": torch.tensor(self.updates), **detached}

    def loaded(self, state_dict: Mapping[str, Any]) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The number of updates in a state dict, and pairs of each live weight with its value there."""
        pairs = []
        for name, weight in self.weights.items():
            value = state_dict[f"module.{name}"]
            if value.shape != weight.shape:
                raise ValueError(f"{name} is {tuple(value.shape)}; here it is {tuple(weight.shape)}")
            pairs.append((weight, value))
        return int(state_dict["n_averaged"]), pairs


def _parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this process has of tensors that may be in parts."""
    return list(map(part_of, tensors))
