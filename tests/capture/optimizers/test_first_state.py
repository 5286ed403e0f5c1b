"""First optimizer state that is made from more than its parameter: a position, a group, a count, what is there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

FIRST: dict[str, Callable[[Any, int, int, Any], float]] = {
    "the position": lambda _optimizer, _group, position, _p: position,
    "the group": lambda _optimizer, group, _position, _p: group,
    "a count": lambda optimizer, _group, _position, _p: optimizer.counted(),
    "how much state there is": lambda optimizer, _group, _position, _p: len(optimizer.state),
    "the sizes": lambda _optimizer, _group, _position, p: p.numel(),
}


class Damped(torch.optim.Optimizer):
    def __init__(self, params: Any, first: Callable[[Any, int, int, Any], float]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.first, self.calls = first, 0

    def counted(self) -> int:
        self.calls += 1
        return self.calls

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if "depth" not in self.state[p]:
                    self.state[p]["depth"] = torch.tensor(float(self.first(self, index, position, p)))
                p.add_(p.grad * 0.5 ** self.state[p]["depth"], alpha=-group["lr"])


@pytest.mark.one_case
@pytest.mark.parametrize("name", FIRST)
def test_first_state_is_that_of_eager_mode(name: str) -> None:
    def trained(capture: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = Damped(
            [{"params": model[0].parameters()}, {"params": model[1].parameters()}], FIRST[name]
        )
        step = mg.train_graph(model, nn.MSELoss(), optimizer)
        x, target = torch.ones(1, 2), torch.zeros(1, 2)
        for _ in range(3):
            if capture:
                step(x, target)
            else:
                optimizer.zero_grad()
                nn.MSELoss()(model(x), target).backward()
                optimizer.step()
        return [*(p.detach() for p in model.parameters()), *(s["depth"] for s in optimizer.state.values())]

    assert all(map(torch.equal, trained(False), trained(True)))
