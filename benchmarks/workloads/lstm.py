"""A language model on nn.LSTM: a recurrent layer that PyTorch runs as one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.workload import Update, Workload
from benchmarks.workloads.gpt import random_text, token_loss


@dataclass(frozen=True)
class Sizes:
    """Recurrent layers, their width, words, and the shape of a batch."""

    depth: int
    width: int
    vocabulary: int
    batch: int
    length: int


def workload(*, smoke: bool) -> Workload:
    """A language model on random tokens."""
    sizes = Sizes(1, 16, 32, 2, 5) if smoke else Sizes(2, 256, 2048, 16, 64)

    return Workload(
        name="lstm",
        title=f"LSTM, {sizes.depth} layers of {sizes.width}, {sizes.batch}x{sizes.length} tokens, vocabulary "
        f"{sizes.vocabulary}, AdamW",
        sizes=sizes,
        make_model=lambda: RecurrentModel(sizes),
        make_batch=lambda generator: random_text(sizes.vocabulary, sizes.batch, sizes.length, generator),
        loss=token_loss,
        update=Update("adamw", lr=1e-3, weight_decay=0.01),
        jax_port="lstm",
    )


class RecurrentModel(nn.Module):
    """Embedding, LSTM, linear head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.lstm = nn.LSTM(sizes.width, sizes.width, sizes.depth, batch_first=True)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits
