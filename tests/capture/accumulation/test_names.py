"""Names with capital letters: those of arguments, modules and parameters stay what they are in the program of all micro-batches."""

from __future__ import annotations

import torch
from torch import nn

import monograph as mg


class _Step(mg.Graph):
    def __init__(self, parts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.myNet = nn.Sequential()
        self.myNet.W = nn.Parameter(torch.randn(2, 2))
        self.myNet.w = nn.Parameter(torch.randn(2, 2))
        self.add_optimizer(torch.optim.SGD(self.myNet.parameters(), 0.1, momentum=0.9))
        if parts > 1:
            self.config.set_gradient_accumulation_steps(parts)

    def build(self, X: torch.Tensor, x: torch.Tensor, inputIds: torch.Tensor) -> torch.Tensor:
        loss = (X @ self.myNet.W + x @ self.myNet.w - inputIds).square().mean()
        loss.backward()
        return loss


def test_capital_letters_in_names_stay() -> None:
    batch = torch.randn(4, 2), torch.randn(4, 2), torch.randn(4, 2)
    names = []
    for parts in (1, 2):
        step = _Step(parts)
        step(*batch)
        assert step.verify(*batch).ok
        names.append([line.split(",")[0].strip() for line in step.show().splitlines() if "# user " in line])
    assert names[0][:3] == names[1][:3] == ["X", "x", "inputIds"]
