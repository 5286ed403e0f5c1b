"""Moving averages of weights in an artifact, where there is no module to take the parameters from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monograph.checkpoint.leaves import Json, check


class StoredAverage:
    """The number of updates of an average, which says how much the next one counts."""

    def __init__(self, decay: Json, part: Any) -> None:
        """`part` is the average in the state, as `AveragedModel` would keep it."""
        check(type(decay) is float and 0.0 <= decay <= 1.0, "an average has no decay")
        counter: Any = part.get("n_averaged") if isinstance(part, dict) else None
        check(
            isinstance(counter, torch.Tensor) and counter.numel() == 1 and counter.dtype is torch.int64,
            "an average has no number of updates",
        )
        self.decay: float = decay
        self._counter: torch.Tensor = counter
        self.updates = int(counter.item())
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # average and parameter

    def __getitem__(self, key: str) -> float:
        """The weight of the parameters in the next update: 1 in the first, which is a copy."""
        assert key == "weight"
        return 1 - self.decay if self.updates else 1.0

    def find_pairs(self, path: str, tensors: Mapping[str, Any]) -> None:
        """Look up the averages and their parameters among the tensors that programs take."""
        prefix = f"ema/{path}/"
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                parameter = tensors.get(f"{path}.{name.removeprefix(prefix)}")
                fits = isinstance(parameter, torch.Tensor) and parameter.shape == tensor.shape
                check(fits, f"the average of {path} has no parameter for {name!r}")
                self.pairs.append((tensor, parameter))  # type: ignore[arg-type]

    def finish(self, updates: int) -> None:
        """Count an update that a step has made, `updates` being those before it. Twice is once."""
        if updates == 0:
            with torch.no_grad():
                for average, parameter in self.pairs:
                    average.copy_(parameter)
        self.updates = updates + 1
        self._counter.fill_(self.updates)
