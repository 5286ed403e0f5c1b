"""A step inside of an autocast block that stays open: eager mode keeps the casts of old weights, and the log says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg

WARNED = "autocast is on around the call"


def _trained() -> mg.Graph:
    model = nn.Linear(4, 2)
    return mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_training_step_in_a_block_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _trained()(torch.randn(8, 4), torch.zeros(8, 2))
    assert caplog.text.count(WARNED) == 1


def test_where_no_cast_is_kept_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        _trained()(torch.randn(8, 4), torch.zeros(8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mg.trace(nn.Linear(4, 2))(torch.randn(8, 4))
    step = _trained()
    step.config.enable_amp(dtype=torch.bfloat16)
    step(torch.randn(8, 4), torch.zeros(8, 2))
    assert WARNED not in caplog.text
