"""State that other tensors of the same form have replaced is bound anew without a build; all numbers are eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

import monograph as mg
from tests.support import assert_same
from tests.support.choice import only_quick


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


class Side:
    """A model and its optimizer, trained by a graph or by plain PyTorch."""

    def __init__(self, make: Callable[[Any], Optimizer], *, graph: bool, backend: str = "aten") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.optimizer = make(self.model.parameters())
        self.graph = Step(self.model, self.optimizer) if graph else None
        if self.graph is not None:
            self.graph.config.backend(backend)

    def train(self, *seeds: int, rows: int = 3) -> None:
        for seed in seeds:
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
            if self.graph is not None:
                self.graph(x)
            else:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()

    @property
    def first(self) -> dict[str, Any]:
        """The state of the first parameter."""
        return self.optimizer.state[next(self.model.parameters())]

    def state(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


Change = Callable[[Side], Any]


def both(make: Callable[[Any], Optimizer], change: Change, backend: str = "aten") -> tuple[Side, Side]:
    """Two sides that were trained, changed, and trained on."""
    sides = Side(make, graph=False), Side(make, graph=True, backend=backend)
    for side in sides:
        side.train(1, 2)
        side.train(3, rows=2)
        change(side)
        side.train(4, 5)
        side.train(6, rows=2)
    return sides


def check(make: Callable[[Any], Optimizer], change: Change, *reasons: str) -> Side:
    plain, graph = both(make, change)
    assert_same(plain.state(), graph.state())
    assert graph.graph is not None
    found = [build.reason for build in graph.graph.builds[2:]]
    assert found == list(reasons)
    return graph


def reload(side: Side) -> None:
    state = copy.deepcopy(side.optimizer.state_dict())
    side.train(7)
    side.optimizer.load_state_dict(state)


def replace_entries(side: Side) -> None:
    for parameter, entries in list(side.optimizer.state.items()):
        side.optimizer.state[parameter] = {
            key: item * 2 if isinstance(item, torch.Tensor) and key != "step" else item
            for key, item in entries.items()
        }


def replace_tensors(side: Side) -> None:
    for entries in side.optimizer.state.values():
        for key, item in entries.items():
            entries[key] = item.clone() if isinstance(item, torch.Tensor) else item


def other_storages(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.data = parameter.data * 2


def assigned(side: Side) -> None:
    """Other parameters: the optimizer has to hold them, and its state to be theirs."""
    old = list(side.model.parameters())
    state = {key: item.clone() for key, item in side.model.state_dict().items()}
    side.model.load_state_dict(state, assign=True)
    new = dict(zip(old, side.model.parameters(), strict=True))
    for group in side.optimizer.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]
    for parameter in old:
        if parameter in side.optimizer.state:
            side.optimizer.state[new[parameter]] = side.optimizer.state.pop(parameter)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": AdamW,
    "AdamW fused": lambda p: AdamW(p, fused=True),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD": lambda p: SGD(p, lr=0.1),
    "Adagrad": Adagrad,
    "RMSprop": RMSprop,
}


@pytest.mark.one_case
@pytest.mark.parametrize("change", [reload, replace_entries, replace_tensors, other_storages, assigned])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_of_the_same_form_needs_no_build(make: Callable[[Any], Optimizer], change: Change) -> None:
    check(make, change)


@pytest.mark.long
def test_a_tensor_that_stays_in_another_place_is_not_bound() -> None:
    """The optimizer keeps the old learning rate among its defaults, where a step may find it."""
    reason = "state was replaced that the step reads in another place too"
    check(lambda p: AdamW(p, lr=torch.tensor(0.01)), reload, reason)  # a build for both sizes


@pytest.mark.long
@pytest.mark.parametrize("change", only_quick([reload, other_storages, assigned], other_storages))
def test_compiled_steps_follow(change: Change) -> None:
    plain, graph = both(AdamW, change, "inductor")
    assert graph.graph is not None
    assert [build.backend for build in graph.graph.builds] == ["inductor", "inductor"]
    torch.testing.assert_close(graph.state()[0], plain.state()[0])
    torch.testing.assert_close(graph.state()[1]["state"], plain.state()[1]["state"])


def test_the_new_tensors_are_the_state() -> None:
    side = Side(AdamW, graph=True)
    side.train(1)
    mine, old = torch.zeros(4, 4), side.first["exp_avg"]
    kept = old.clone()
    side.first["exp_avg"] = mine
    side.train(2)
    assert side.first["exp_avg"] is mine
    assert mine.abs().sum() > 0
    assert_same(kept, old)


def test_the_old_tensors_can_be_freed() -> None:
    side = Side(AdamW, graph=True)
    side.train(1)
    side.train(2, rows=2)
    gone = weakref.ref(side.first["exp_avg"])
    reload(side)
    side.train(3)
    gc.collect()
    assert gone() is None


# --- what is of another form -------------------------------------------------------------------------------------------


def other_dtype(side: Side) -> None:
    side.first["exp_avg"] = side.first["exp_avg"].double()


def other_strides(side: Side) -> None:
    side.first["exp_avg"] = side.first["exp_avg"].t().contiguous().t()


def other_key(side: Side) -> None:
    side.first["note"] = 1


def number(side: Side) -> None:
    side.first["step"] = side.first["step"].item()


STATE = "optimizer.0/model.0.weight"


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_strides, f"strides of {STATE}/exp_avg changed from (4, 1) to (1, 4)"),
        (other_key, f"{STATE}/note is new"),
    ],
)
def test_another_form_is_a_build_that_says_what_differs(change: Change, reason: str) -> None:
    graph = check(AdamW, change, reason).graph  # a build for both sizes
    assert graph is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_dtype, f"dtype of {STATE}/exp_avg changed from torch.float32 to torch.float64"),
        (number, f"{STATE}/step changed from a tensor of shape () to a finite number"),
    ],
)
def test_the_reason_where_eager_mode_raises(change: Change, reason: str) -> None:
    side = Side(AdamW, graph=True)
    side.train(1)
    change(side)
    side.graph.config.max_builds(1)  # type: ignore[union-attr]
    with pytest.raises(mg.errors.CaptureError):
        side.train(2)


def one_tensor(side: Side) -> None:
    first, second, *_ = (e for p, e in side.optimizer.state.items() if p.shape == (4,))
    first["exp_avg"] = second["exp_avg"]


def one_memory(side: Side) -> None:
    memory = torch.zeros(8)
    first, second, *_ = (e for p, e in side.optimizer.state.items() if p.shape == (4,))
    first["exp_avg"], second["exp_avg"] = memory[:4], memory[4:]


def test_tensors_that_became_one_are_not_bound() -> None:
    side = Side(AdamW, graph=True)
    side.train(1)
    one_tensor(side)
    side.train(2)
    assert len(side.graph.builds) == 2  # type: ignore[union-attr]


@pytest.mark.long
def test_tensors_in_one_memory_are_not_bound() -> None:
    plain, graph = both(AdamW, one_memory)
    assert_same(plain.state(), graph.state())
    assert len(graph.graph.builds) == 3  # type: ignore[union-attr]  # the third one is for both sizes


class Velocities(torch.optim.Optimizer):
    """Keeps its state in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["velocity"] = [torch.zeros_like(parameter)]
                (velocity,) = state["velocity"]
                parameter.sub_(velocity.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


def test_a_tensor_in_a_list_of_an_optimizers_state_is_replaced() -> None:
    def trained(*, by_graph: bool) -> list[list[float]]:
        torch.manual_seed(0)
        model, found = nn.Linear(2, 1), []
        optimizer = Velocities(model.parameters())
        step = mg.train_graph(model, nn.MSELoss(), optimizer)
        for number in range(5):
            if number == 3:
                for state in optimizer.state.values():
                    state["velocity"][0] = torch.full_like(state["velocity"][0], 2.0)
            if by_graph:
                step(torch.ones(3, 2), torch.zeros(3, 1))
            else:
                step.eager(torch.ones(3, 2), torch.zeros(3, 1))
            found.append(model.weight.flatten().tolist())
        return found

    assert trained(by_graph=True) == trained(by_graph=False)
