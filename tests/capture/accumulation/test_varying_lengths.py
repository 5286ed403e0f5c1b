"""Lengths that vary under gradient accumulation, alone and with batches: one build for all of them, with eager's bits."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import assert_same


class Model(nn.Module):
    """Tokens, places, causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(40, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        made: torch.Tensor = self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True))
        return made


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / labels.shape[1]


class Step(mg.Graph):
    """Two micro-batches, whose logits come back joined."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.backend("aten")
        self.config.set_gradient_accumulation_steps(2)

    def build(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(tokens)
        loss = loss_of(logits, labels)
        loss.backward()
        return loss, logits


def test_lengths_vary(tmp_path) -> None:
    torch.manual_seed(0)
    plain = Model()
    traced = copy.deepcopy(plain)
    optimizer, step = torch.optim.AdamW(plain.parameters()), Step(traced)
    for shape in ((4, 12), (4, 9), (4, 31), (6, 10), (6, 13), (4, 12), (8, 4), (2, 9)):
        tokens, labels = torch.randint(20, shape), torch.randint(20, shape)
        optimizer.zero_grad()
        losses, logits = [], []
        for part, wanted in zip(tokens.chunk(2), labels.chunk(2), strict=True):
            logits.append(plain(part))
            losses.append(loss_of(logits[-1], wanted))
            (losses[-1] / 2).backward()
        optimizer.step()
        assert_same([torch.stack(losses), torch.cat(logits)], list(step(tokens, labels)), str(shape))
        assert_same(plain.state_dict(), traced.state_dict(), str(shape))
    assert len(step.builds) == 3  # the first one, for lengths, for batches and lengths
    artifact = mg.load(mg.save(step, tmp_path / "artifact"))
    tokens, labels = torch.randint(20, (10, 17)), torch.randint(20, (10, 17))
    assert_same(list(step(tokens, labels)), list(artifact(tokens, labels)))


def test_a_batch_that_is_its_own_target() -> None:
    step, tokens = Step(Model()), torch.randint(20, (4, 6))
    other = Step(copy.deepcopy(step.model))
    assert_same(list(step(tokens, tokens)), list(other(tokens, tokens.clone())))
