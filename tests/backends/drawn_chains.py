"""Programs of element-wise ops, drawn at random: their ops, arguments of all forms, and which results others read."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": F.relu,
    "square": lambda x: x**2,
    "cube": lambda x: x.pow(3),
    "hardtanh": lambda x: F.hardtanh(x, -1.5, 0.7),
    "clamp": lambda x: x.clamp(-0.5, 2),
    "at least": lambda x: x.clamp(min=-0.25),
    "at most": lambda x: x.clamp_max(0.75),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "less one": lambda x: 1 - x,
    "scaled": lambda x: x * 0.3 + 1e-3,
    "softsign": lambda x: x / (1 + x.abs()),
    "root": lambda x: torch.rsqrt(x.abs() + 0.5),
    "inverse": lambda x: 1 / (x.abs() + 0.5),
    "signed": lambda x: x.sign() * x,
    "masked": lambda x: x.masked_fill(x > 1, 0.5),
}
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": lambda x, y: torch.sub(x, y, alpha=0.7),
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "chosen": lambda x, y: torch.where(x < y, x, 2 * y),
    "product": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "both": lambda x, y: torch.where((x > 0) & (y <= 1), x, y),
}


class Drawn(nn.Module):
    """A program of so many ops on its argument and on parameters that are spread over it."""

    def __init__(self, seed: int, shape: Sequence[int], dtype: torch.dtype, *, count: int = 12) -> None:
        super().__init__()
        source = random.Random(seed)
        torch.manual_seed(seed)
        *outer, width = shape
        forms = [tuple(shape), (width,), (*outer, 1), (), tuple(shape)]
        self.given = nn.ParameterList([torch.randn(form, dtype=dtype) for form in forms])
        self._ops = [
            (source.choice([*UNARY, *BINARY, *BINARY]), source.random(), source.random())
            for _ in range(count)
        ]
        self._mixed = source.random() < 0.5
        self._others = {index for index in range(count) if source.random() < 0.15}

    def forward(self, x: Tensor) -> list[Tensor]:
        """The last value, and some of those before."""
        known, found = [x, *self.given], []
        for index, (name, first, second) in enumerate(self._ops):
            one = known[int(len(known) * (1 - first * first)) - 1]
            other = known[int(len(known) * second)]
            made = UNARY[name](one) if name in UNARY else BINARY[name](one, other)
            known.append(made)
            if index in self._others:
                found.append(made)
            if self._mixed and index == len(self._ops) // 2:
                known.append(made.sum(-1, keepdim=True).expand(made.shape) * 0.01)
        whole: Tensor = sum(known[-3:])  # type: ignore[assignment]
        return [whole, *found]
