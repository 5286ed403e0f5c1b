"""The first state of each parameter is what a trial of it alone would find, though one of a kind stands for the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import monograph as mg
from monograph.capture.optimizers import declared_state, trial_steps
from monograph.capture.optimizers.declared_state import declare_state
from monograph.capture.optimizers.trial_steps import first_state

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [
        torch.randn(sizes)
        for sizes in ((4, 3), (3,), (2, 2), (2,), (1, 5), (), (), (2, 3, 2, 2), (3, 2, 1, 1))
    ]
    made += [made[0].clone().t(), made[7].to(memory_format=torch.channels_last), torch.randn(2, 2).double()]
    made += [torch.randn(3, 3).bfloat16(), torch.randn(2, 4).bfloat16(), torch.randn(0, 3), torch.zeros(3, 2)]
    return [nn.Parameter(item) for item in made]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        form = (type(a), a.shape, a.stride(), a.dtype, a.device, a.requires_grad)
        alike = form == (type(b), b.shape, b.stride(), b.dtype, b.device, b.requires_grad)
        return alike and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
    return type(a) is type(b) and a == b


def check(optimizer: Optimizer) -> None:
    found = {
        id(item.parameter): item.entries
        for item in declare_state(SimpleNamespace(name="optimizer.0", optimizer=optimizer))  # type: ignore[arg-type]
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            wanted = {} if optimizer.state.get(parameter) else first_state(optimizer, group, parameter)
            entries = found.get(id(parameter), {})
            assert list(entries) == list(wanted)
            assert all(same(entries[key], wanted[key]) for key in wanted)
    tensors = [
        value for entries in found.values() for value in entries.values() if isinstance(value, torch.Tensor)
    ]
    assert len({item.data_ptr() for item in tensors if item.numel()}) == len(
        [i for i in tensors if i.numel()]
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_parameter_begins_as_by_a_trial_of_its_own(kind: str):
    optimizer = OPTIMIZERS[kind](parameters())
    before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    check(optimizer)
    now = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(map(torch.equal, before, now))


@pytest.mark.parametrize("kind", ["Rprop", "ASGD", "Adagrad", "AdamW"])
def test_groups_begin_apart(kind: str):
    made = parameters()
    groups = [{"params": made[:5]}, {"params": made[5:], "lr": 0.7}]
    optimizer = OPTIMIZERS[kind](groups)
    optimizer.param_groups[0]["lr"] = 0.01
    check(optimizer)


class ByValue(torch.optim.Adam):
    """Begins with the parameter itself, as averages of weights do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"] = p.detach().clone()
                p.sub_(p.grad * 0.1 + state["slow"] * 0.01)


class BySize(torch.optim.Adam):
    """Begins with other numbers for large parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.full_like(p, float(p.numel()))
                p.sub_(p.grad * state["moment"])


@pytest.mark.parametrize("own", [False, True], ids=["the user's", "as if it were torch's"])
@pytest.mark.parametrize("kind", [ByValue, BySize])
def test_state_that_follows_from_more_than_a_form(kind: Any, own: bool, monkeypatch: pytest.MonkeyPatch):
    if own:
        monkeypatch.setattr(declared_state, "is_torchs_own", lambda _optimizer: True)
    zeros = [
        nn.Parameter(torch.zeros(3, 2)),
        nn.Parameter(torch.zeros(4, 2)),
    ]  # a copy of these looks like a form
    check(kind([*zeros, *parameters()]))


def test_a_method_that_was_replaced():
    optimizer = torch.optim.Adam(parameters())
    begin = optimizer._init_group

    def init_group(group: Any, *lists: Any) -> Any:
        found = begin(group, *lists)
        for p in group["params"]:
            if p.numel() > 4:
                optimizer.state[p].setdefault("large", True)
        return found

    optimizer._init_group = init_group  # type: ignore[method-assign]
    assert not declared_state.is_torchs_own(optimizer)
    check(optimizer)


def test_few_trials_for_many_parameters(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(trial_steps, "first_state", lambda *given: asked.append(given) or first_state(*given))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.randn(size, 3)) for size in range(2, 40)])
    check(optimizer)
    assert len(asked) == 2  # a parameter, and one of other sizes and values


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_begins_with_eagers_bits(kind: str):
    class Train(mg.Graph):
        def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().sum()
            loss.backward()
            return loss

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    ours, plain = model(), model()
    optimizer = OPTIMIZERS[kind](plain.parameters())
    step, x = Train(ours, OPTIMIZERS[kind](ours.parameters())), torch.randn(5, 3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(x).square().sum()
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x), loss)
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert len(step.builds) == 1
