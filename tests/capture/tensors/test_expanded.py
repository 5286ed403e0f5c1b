"""Writes through views that expand nothing: what was written is there, and not a sum that comes near it."""

from __future__ import annotations

import torch

import monograph as mg
from tests.support import assert_same


class Scaled(mg.Graph):
    """A tensor that is written through a view."""

    def build(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made = x * 1
        made.expand(1, *made.shape).mul_(scale)
        return made


def test_a_write_through_a_view_that_expands_nothing_has_eagers_bits() -> None:
    source = torch.Generator().manual_seed(0)
    graph = Scaled()
    for _ in range(20):
        x, scale = torch.ones(()), torch.rand((), generator=source) / 16
        assert_same(x * scale, graph(x, scale))
    x, scale = torch.randn(2, 5, generator=source), torch.rand((), generator=source) / 16
    assert_same(x * scale, graph(x, scale))
