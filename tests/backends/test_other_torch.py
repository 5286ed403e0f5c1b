"""A torch that lacks what only speed asks for compiles all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor import write_order
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


@pytest.mark.long
def test_without_hooks_that_order_writes_a_step_compiles_and_is_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(write_order, "_HOOKS", ("no_such_hook",))
    torch.manual_seed(0)
    eager = nn.Linear(3, 2)
    model, again = copy.deepcopy(eager), copy.deepcopy(eager)
    first, second = Step(model), Step(again)
    first(torch.ones(2, 3))
    second(torch.ones(2, 3))
    assert "compiled in" in str(first.explain())
    assert "found in the cache" in str(second.explain())
    eager(torch.ones(2, 3)).square().mean().backward()
    torch.optim.SGD(eager.parameters(), 0.1).step()
    torch.testing.assert_close([*model.parameters(), *again.parameters()], [*eager.parameters()] * 2)
