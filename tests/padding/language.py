"""A small language model, and a training step on batches of tokens whose lengths vary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import monograph as mg

VOCABULARY, IGNORED = 23, -100
SIZES = [4, 8, 16]


class Model(nn.Module):
    """Attention over the tokens before, and a prediction of the next one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        ahead = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=ahead, need_weights=False)
        logits: torch.Tensor = self.head(self.dropout(hidden + attended))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits.flatten(0, 1)
    return nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED)  # at: loss


class Step(mg.Graph):
    """Gives the loss and the logits."""

    def __init__(
        self, *buckets: Any, dropout: float = 0.0, backend: str = "aten", compare: bool = True
    ) -> None:
        super().__init__()
        self.model = Model(dropout)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.config.backend(backend)
        if buckets:
            self.config.buckets(*buckets, compare=compare)

    def build(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(ids)
        loss = loss_of(logits, labels)
        loss.backward()
        return loss, logits


def usual_buckets(sizes: Any = tuple(SIZES), *, ignored: int = IGNORED) -> tuple[Any, Any]:
    return mg.buckets("ids", dim=1, sizes=sizes), mg.buckets("labels", dim=1, sizes=sizes, pad=ignored)


def batches(*lengths: int, rows: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, length + 1), generator=source) for length in lengths]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
