"""A torch that lacks what only speed asks for compiles all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import new_cache


class Step(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), 0.1))
        self.config.backend("inductor")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@pytest.mark.long
def test_a_missing_option_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    missing = "cpp.use_two_step_variance_threshold"
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path_factory.mktemp("cache")))
    config = torch._inductor.config
    known = torch._inductor.list_options()
    monkeypatch.setattr(torch._inductor, "list_options", lambda: [name for name in known if name != missing])
    allowed = config._config
    monkeypatch.delitem(allowed, missing)
    step = Step(nn.Linear(3, 2))
    step(torch.ones(2, 3))
    assert step.builds[0].backend == "inductor"
