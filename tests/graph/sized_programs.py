"""Steps that use the sizes of their arguments in one way each, for tests of sizes that vary.

`SMOOTH` take no branch on a size: a build for all sizes serves them. `OTHERS` branch, loop, or ask for a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Program = Callable[[Any, torch.Tensor], torch.Tensor]
SMOOTH: dict[str, Program] = {}
OTHERS: dict[str, Program] = {}


class Sized(nn.Module):
    """Layers for tensors of shape (batch, length, 8), and a program that uses them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(50, 8)
        self.convolution, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.gru, self.lstm = (
            nn.GRU(8, 8, batch_first=True),
            nn.LSTM(8, 8, 2, bidirectional=True, dropout=0.2),
        )
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(self, x)


def _smooth(program: Program) -> Program:
    return SMOOTH.setdefault(program.__name__, program)


def _other(program: Program) -> Program:
    return OTHERS.setdefault(program.__name__, program)


@_smooth
def mean_by_count(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() / (x.shape[0] * x.shape[1])


@_smooth
def root_of_length(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) / math.sqrt(x.shape[1])).mean()


@_smooth
def flattened(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x.reshape(-1, 8)).view(x.shape[0], -1).mean()


@_smooth
def causal_mask(m: Sized, x: torch.Tensor) -> torch.Tensor:
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    seen = m.linear(x)
    return F.scaled_dot_product_attention(seen, seen, seen, attn_mask=mask).mean()


@_smooth
def positions(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return (x + m.table(torch.arange(x.shape[1]))).mul(m.weight).mean()


@_smooth
def expanded(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return (m.weight.expand(x.shape[0], x.shape[1], 8) * x).mean()


@_smooth
def layer_norms(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return (
        F.layer_norm(x, x.shape[2:], m.weight).mean() + F.layer_norm(m.linear(x), x.shape[1:]).pow(2).mean()
    )


@_smooth
def dropout(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(m.linear(x), 0.3).mean()


@_smooth
def permuted(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x[torch.randperm(x.shape[0])]).pow(2).mean()


@_smooth
def attention_by_einsum(m: Sized, x: torch.Tensor) -> torch.Tensor:
    seen = m.linear(x)
    return torch.einsum("bte,bse->bts", seen, seen).softmax(-1).mean()


@_smooth
def lstm(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.lstm(x.transpose(0, 1))[0].mean()


@_smooth
def counted(m: Sized, x: torch.Tensor) -> torch.Tensor:
    m.seen += x.shape[0]
    return m.linear(x).mean() * m.seen


@_smooth
def in_place(m: Sized, x: torch.Tensor) -> torch.Tensor:
    seen = m.linear(x)
    with torch.no_grad():
        gate = F.hardtanh_(seen.clone()).add_(x.shape[1])
    return (seen * gate).mean()


@_other
def branch(m: Sized, x: torch.Tensor) -> torch.Tensor:
    seen = m.linear(x)
    return seen.mean() if x.shape[1] > 6 else seen.sum()


@_other
def half(m: Sized, x: torch.Tensor) -> torch.Tensor:
    count = x.shape[0] // 2
    return m.linear(x[:count]).sum() + x[count:].mean()


@_smooth
def narrowed(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x.narrow(1, 0, x.size(1) - 1)).mean()


@_other
def loop(m: Sized, x: torch.Tensor) -> torch.Tensor:
    found = x[:, 0]
    for at in range(x.shape[1]):
        found = torch.tanh(m.linear(found) + x[:, at])
    return found.mean()


@_smooth
def pooled(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return F.max_pool1d(m.convolution(x.transpose(1, 2)), 2).mean()


@_smooth
def normalised(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.linear(x).transpose(1, 2)).pow(2).mean()


@_smooth
def unrolled(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.gru(x)[0].mean()


@_smooth
def written(m: Sized, x: torch.Tensor) -> torch.Tensor:
    made = m.linear(x)
    shifted = torch.zeros_like(made)
    shifted[:, 1:] = made[:, :-1]
    return (shifted * made).mean()


@_smooth
def by_length(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum() / len(x)


@_other
def key(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).mean() * {x.shape: 1.0}[x.shape]


@_other
def padded(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return F.pad(m.linear(x), (0, 0, 0, -x.shape[1] % 4)).mean()


@_smooth
def taken_apart(m: Sized, x: torch.Tensor) -> torch.Tensor:
    first, *rest = m.linear(x).chunk(2, dim=1)
    return first.mean() + sum(item.sum() for item in rest)


@_other
def weighted_in_python(m: Sized, x: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0 / (at + 1) for at in range(x.shape[1])])
    return (m.linear(x) * weights[:, None]).mean()


@_other
def shortest(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x[:, : min(x.shape[1], 7)]).mean()


@_other
def fixed_batch(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x.view(4, -1, 8)).mean()


@_other
def written_out(m: Sized, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).mean() * len(f"{x.shape[1]} of {x.shape}")


@_smooth
def asked_for_its_class(m: Sized, x: torch.Tensor) -> torch.Tensor:
    plain = isinstance(x.shape[1], int) and type(x.shape[0]) is int
    return m.linear(x).mean() * (2 if plain else 3)
