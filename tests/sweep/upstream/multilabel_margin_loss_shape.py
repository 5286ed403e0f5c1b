"""The fake kernel of multilabel_margin_loss tells another shape for a single sample than the real one gives.

Ends with status 0 as long as the shapes differ.
"""

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.multilabel_margin_loss(x, y, reduction="none")


x, y = torch.randn(5), torch.tensor([3, 0, -1, -1, -1])
with FakeTensorMode() as mode:
    fake = loss(mode.from_tensor(x), mode.from_tensor(y))
sys.exit(fake.shape == loss(x, y).shape)
