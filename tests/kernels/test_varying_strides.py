"""Compiled steps with products of tensors whose strides vary while their shapes do not: the first token of each sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import monograph as mg

LENGTHS = (28, 31, 5, 40)


class Classifier(nn.Module):
    """Takes a sequence by its first token, its last one, and one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.hidden = nn.Linear(32, 32)
        self.first, self.last, self.third = nn.Linear(32, 2), nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.embedding(tokens))
        return self.first(hidden[:, 0]) + self.last(hidden[:, -1]) * self.third(hidden[:, 2]).tanh()


class Step(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.backend("inductor")

    def build(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(tokens), labels)
        loss.backward()
        return loss


@pytest.mark.one_case
@pytest.mark.parametrize("declared", [True, pytest.param(False, marks=pytest.mark.search)])
def test_there_is_one_build_for_all_lengths(declared: bool) -> None:
    torch.manual_seed(0)
    plain = Classifier()
    optimizer = torch.optim.AdamW(plain.parameters())
    step = Step(copy.deepcopy(plain))
    if declared:
        step.config.dynamic("tokens", 1, max=64)
    for length in LENGTHS:
        tokens, labels = torch.randint(50, (8, length)), torch.randint(2, (8,))
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(plain(tokens), labels)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(tokens, labels), expected)
    torch.testing.assert_close(dict(step.model.state_dict()), dict(plain.state_dict()))
    assert len(step.builds) == (1 if declared else 2), [str(build.reason) for build in step.builds]
    assert all(build.backend == "inductor" for build in step.builds)
