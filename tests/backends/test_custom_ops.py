"""Custom ops in a compiled step: those that keep what their fake kernels tell, and those that do not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import monograph as mg


@torch.library.custom_op("monograph_tests_compiled::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Half of it."""
    return x * 0.5


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("monograph_tests_compiled::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """Half of it, laid out by columns, which its fake kernel does not tell."""
    return (x.t() * 0.5).contiguous().t()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Step(mg.Graph):
    """A custom op behind a module."""

    def __init__(self, module: nn.Module, op) -> None:
        super().__init__()
        self.module, self.op = module, op
        self.config.backend("inductor")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """Forward only."""
        with torch.no_grad():
            return self.op(self.module(x)).relu() + 1


def test_a_custom_op_is_part_of_the_compiled_step():
    module = nn.Linear(3, 4)
    step = Step(module, halved)
    for _ in range(3):
        x = torch.randn(5, 3)
        torch.testing.assert_close(step(x), (module(x) * 0.5).relu().detach() + 1)
    assert step.backend == "inductor"


@pytest.mark.long
def test_a_custom_op_of_another_layout_than_it_tells_is_found_out_before_it_spoils_a_step(caplog):
    module = nn.Linear(3, 4)
    step = Step(module, turned)
    with caplog.at_level(logging.INFO, "monograph"):
        for _ in range(3):
            x = torch.randn(5, 3)
            torch.testing.assert_close(step(x), (module(x) * 0.5).relu().detach() + 1)
    assert step.backend == "inductor"  # compiled again, from a trace on real tensors
    assert len(step.builds) == 1
    assert "its fake kernel reports" in caplog.text
