"""First optimizer state that is made from more than its parameter: a position, a group, a count, what is there already."""

from __future__ import annotations

import copy
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


def three_steps(step: Any, model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """By a graph, or by plain PyTorch if there is none."""
    for _ in range(3):
        if step is not None:
            step(x, y)
        else:
            optimizer.zero_grad()
            nn.MSELoss()(model(x), y).backward()
            optimizer.step()


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
        three_steps(step if capture else None, model, optimizer, torch.ones(1, 2), torch.zeros(1, 2))
        return [*(p.detach() for p in model.parameters()), *(s["depth"] for s in optimizer.state.values())]

    assert all(map(torch.equal, trained(False), trained(True)))


TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),  # whose state begins with lr
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),  # which has its state from the start
}


@pytest.mark.parametrize("lost", ["loaded", "cleared"])
@pytest.mark.parametrize("name", TORCHS)
def test_an_optimizer_that_begins_again_costs_no_build(name: str, lost: str) -> None:
    """Several trainings from the same start, one after the other, with other rates."""

    def trained(capture: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = TORCHS[name](model.parameters())
        first = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        step = mg.train_graph(model, nn.MSELoss(), optimizer)
        x, y, found = torch.ones(8, 4), torch.zeros(8, 2), []
        for rate in (0.1, 0.2, 0.3):
            model.load_state_dict(first[0])
            if lost == "loaded" or name == "adagrad":
                optimizer.load_state_dict(copy.deepcopy(first[1]))
            else:
                optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = rate
            three_steps(step if capture else None, model, optimizer, x, y)
            found += [item.detach().clone() for item in model.parameters()]
            kept = [entry for state in optimizer.state.values() for entry in state.values()]
            found += [item.clone() for item in kept if isinstance(item, torch.Tensor)]
        return found, len(step.builds)

    (expected, _), (found, builds) = trained(False), trained(True)
    assert all(map(torch.equal, expected, found))
    assert builds == 1


def test_a_step_that_fails_leaves_an_optimizer_that_begins_again_without_state() -> None:
    class Step(mg.Graph):
        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)
            self.config.detect_nonfinite()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, optimizer)
    step(torch.ones(8, 4))
    optimizer.state.clear()
    with pytest.raises(mg.NonfiniteError):
        step(torch.full((8, 4), float("nan")))
    assert not any(optimizer.state.values())
    step(torch.ones(8, 4))
    assert len(step.builds) == 1
    assert all(item["step"] == 1 for item in optimizer.state.values())
