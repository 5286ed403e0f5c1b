"""Arguments that are parts of larger tensors, as x[:, :n]: one build for all sizes, with eager mode's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax

import monograph as mg
from tests.support import assert_same

Batches = list[tuple[torch.Tensor, torch.Tensor]]
ROWS, LENGTH, WIDTH = 8, 16, 6


class Net(nn.Module):
    """Layers, sums, copies and strides: what looks at how a tensor lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
        self.conv = nn.Conv1d(WIDTH, 5, 3, padding=1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = log_softmax(self.linear(x).flatten(0, 1), -1)
        loss = -logits.gather(1, labels.reshape(-1, 1)).mean()
        images = self.conv(x.transpose(1, 2)).amax(-1).square().mean()
        return loss + images + x.sum() * 0.1 + x.reshape(-1).cumsum(0)[-1] * 1e-3


class Step(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), 0.01))
        self.config.backend("aten")

    def build(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x, labels)
        loss.backward()
        return loss


def _larger() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (ROWS, LENGTH), generator=draws)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=draws), labels


def _parts(cut: Callable[[torch.Tensor, int], torch.Tensor], sizes: list[int]) -> Batches:
    x, labels = _larger()
    return [(cut(x, size), cut(labels, size)) for size in sizes]


def _last(sizes: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    for size in sizes:
        x = torch.randn(4, size, 2 * WIDTH, generator=draws)
        yield x[..., :WIDTH], torch.randint(4, (4, size, 2), generator=draws)[..., 0]


PARTS: dict[str, tuple[Batches, int]] = {  # and how many builds serve them
    "lengths": (_parts(lambda x, n: x[:, :n], [5, 7, 9, 11, 3, 4, 5, 12]), 2),
    "and the whole": (_parts(lambda x, n: x[:, :n], [5, 7, 16, 11, 16]), 3),
    "rows": (_parts(lambda x, n: x[:n, 2:9], [3, 5, 7, 8, 4, 2]), 2),
    "rows and lengths": (_parts(lambda x, n: x[: n // 2, 1:n], [6, 8, 12, 7, 14]), 2),
    "every second": (_parts(lambda x, n: x[::2, :n:2], [6, 9, 12, 15, 8]), 2),
    "columns of a tensor whose size varies": (list(_last([3, 5, 7, 6, 9])), 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_bits_of_eager_mode(name: str) -> None:
    batches, num_builds = PARTS[name]
    torch.manual_seed(0)
    step = Step(Net())
    torch.manual_seed(0)
    eager = Net()
    optimizer = torch.optim.SGD(eager.parameters(), 0.01)
    for x, labels in batches:
        optimizer.zero_grad()
        loss = eager(x, labels)
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), step(x, labels).detach())
        assert_same(list(eager.parameters()), list(step.model.parameters()))
    assert len(step.builds) == num_builds, [str(build.reason) for build in step.builds]


def test_a_step_writes_into_a_part() -> None:
    @mg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum(1)

    ours, theirs = _larger()[0], _larger()[0]
    for size in (5, 7, 9, 3, 12):
        part = theirs[:, :size]
        part.mul_(2)
        assert_same(part.sum(1), step(ours[:, :size]))
        assert_same(theirs, ours)
    assert len(step.builds) == 2
