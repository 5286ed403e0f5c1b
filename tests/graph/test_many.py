"""`graph.many`: several steps in one call, with the numbers of as many calls, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support.choice import only_quick


class Net(nn.Module):
    """Statistics that move and masks that are drawn, so that each step depends on the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(F.relu(self.norm(self.first(x)))))


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        return {
            "loss": loss,
            "right": (logits.argmax(1) == y).sum(),
            "weight": self.model.second.weight,
            "none": None,
        }


def made(schedule: str = "") -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = {
        "": lambda: None,
        "steps": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "to zero": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=7),
        "of the user": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number)),
    }[schedule]()
    return model, optimizer, scheduler


def batches(steps: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, 6, 4, generator=generator)
    return x, torch.randint(3, (steps, 6), generator=generator)


def eager(model: nn.Module, optimizer: Any, scheduler: Any, xs: torch.Tensor, ys: torch.Tensor) -> list[Any]:
    """The losses of plain PyTorch."""
    losses = []
    for x, y in zip(xs, ys, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.every_case
@pytest.mark.parametrize("schedule", ["", "steps", "to zero", "of the user"])
def test_the_bits_are_those_of_eager_steps(schedule: str) -> None:
    xs, ys = batches()
    model, optimizer, scheduler = made(schedule)
    torch.manual_seed(1)
    losses = eager(model, optimizer, scheduler, xs, ys)

    ours, own, own_scheduler = made(schedule)
    graph = Step(ours, own, own_scheduler)
    torch.manual_seed(1)
    first = graph.many(xs[:2], ys[:2])
    rest = graph.many(xs[2:], y=ys[2:])

    assert torch.equal(torch.cat([first["loss"], rest["loss"]]), torch.stack(losses))
    for key, value in model.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key
    assert own.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert first["none"] is None
    assert first["loss"].requires_grad
    assert torch.equal(rest["weight"][-1], ours.second.weight)  # each has the value of its own step
    assert not torch.equal(rest["weight"][0], rest["weight"][1])
    assert graph.state_dict()["graph.steps"] == 8


@pytest.mark.long  # quick: test_many_in_a_loop.py
def test_compiled_steps_are_those_of_single_calls() -> None:
    xs, ys = batches()
    sides = []
    for _ in range(2):
        model, optimizer, scheduler = made("steps")
        graph = Step(model, optimizer, scheduler)
        graph.config.backend("inductor")
        sides.append((model, graph))
    torch.manual_seed(1)
    together = sides[0][1].many(xs, ys)["loss"]
    torch.manual_seed(1)
    one_by_one = [sides[1][1](x, y)["loss"] for x, y in zip(xs, ys, strict=True)]
    assert torch.equal(together, torch.stack(one_by_one))
    assert all(map(torch.equal, sides[0][0].parameters(), sides[1][0].parameters()))


class Counting(mg.Graph):
    """Python moves with each step, and nothing is a tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.seen = 0
        self.log: list[int] = []

    def build(self, batch: dict[str, Any], scale: float = 1.0, *, name: str = "a") -> Any:
        self.seen += 1
        return {"y": self.model(batch["x"]) * scale * self.seen, "name": name, "counts": [self.seen, 2.5]}


def test_python_objects_move_with_each_step() -> None:
    graph, xs = Counting(), torch.randn(9, 3, 2)
    found = graph.many({"x": xs}, 0.5, name="b")
    expected = [graph.model(x) * 0.5 * number for number, x in enumerate(xs, 1)]
    assert torch.equal(found["y"], torch.stack(expected))
    assert found["name"] == ["b"] * 9
    assert found["counts"] == [list(range(1, 10)), [2.5] * 9]
    assert graph.seen == 9


def test_one_stack_for_two_arguments_and_changes_in_place() -> None:
    @mg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x is y, y.sum()

    xs = torch.arange(6.0).reshape(3, 2)
    same, sums = step.many(xs, xs)
    assert same == [True] * 3
    assert torch.equal(sums, torch.tensor([3.0, 7.0, 11.0]))
    assert torch.equal(xs, torch.arange(6.0).reshape(3, 2) + 1)


def test_a_stack_on_the_memory_of_state() -> None:
    class Shift(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.register_buffer("table", torch.arange(6.0).reshape(3, 2))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.model.table.add_(1)
            return x * 2

    graph = Shift()
    around = torch.zeros(9, 3, 2)
    graph.model.table.data = around[8]  # the last part is on memory of the state
    with pytest.raises(mg.AliasError, match="in step 8 of 9"):
        graph.many(around)
    assert torch.equal(graph.model.table, torch.full((3, 2), 8.0))


@pytest.mark.every_case
@pytest.mark.parametrize("backend", only_quick(["aten", "inductor"], "aten"))
@pytest.mark.parametrize("bad", [0, 1, 6])
def test_an_error_says_which_step_and_leaves_the_state_before_it(bad: int, backend: str) -> None:
    xs, ys = batches()
    broken = ys.clone()
    broken[bad, 2] = 7
    model, optimizer, scheduler = made("steps")
    graph = Step(model, optimizer, scheduler)
    graph.config.backend(backend)
    torch.manual_seed(1)
    with pytest.raises(IndexError) as raised:
        graph.many(xs, broken)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    state = "before the call" if bad == 0 else f"after step {bad - 1}"
    assert f"in step {bad} of 8, counted from 0: the state is that of {state}" in told

    reference, own, own_scheduler = made("steps")
    again = Step(reference, own, own_scheduler)
    again.config.backend(backend)
    torch.manual_seed(1)
    for x, y in zip(xs[:bad], ys[:bad], strict=True):
        again(x, y)
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"]
    torch.manual_seed(2)
    loss = graph(xs[bad], ys[bad])["loss"]
    torch.manual_seed(2)
    assert torch.equal(loss, again(xs[bad], ys[bad])["loss"])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((1.0, None), "many() gets no tensor"),
        (
            (torch.ones(3, 6, 4), torch.ones(2, 6, dtype=torch.int64)),
            "different numbers of steps: x has 3, y has 2",
        ),
        (
            (torch.ones(0, 6, 4), torch.ones(0, 6, dtype=torch.int64)),
            "the first dimension of its arguments is 0",
        ),
        ((torch.ones(2, 6, 4), torch.tensor(1)), "y has no dimension"),
        ((torch.ones(2, 6, 4, requires_grad=True), torch.ones(2, 6, dtype=torch.int64)), "x requires grad"),
        ((torch.ones(2, 6, 4).to_sparse(), torch.ones(2, 6, dtype=torch.int64)), "x is sparse"),
    ],
    ids=["none", "lengths", "empty", "scalar", "gradients", "sparse"],
)
def test_arguments_that_are_no_stacks(args: Any, told: str) -> None:
    model, optimizer, _ = made()
    graph = Step(model, optimizer)
    with pytest.raises(mg.SignatureError) as raised:
        graph.many(*args)
    assert told in str(raised.value)
    assert "hint:" in str(raised.value)
    assert not graph.builds


def test_results_that_cannot_be_stacked() -> None:
    @mg.trace
    def step(x: torch.Tensor) -> Any:
        return x[: 2 if x[0] > 0 else 1].clone()

    with pytest.raises(mg.SignatureError, match="different shapes"):
        step.many(torch.tensor([[1.0, 2.0], [-1.0, 2.0]]))


def test_guards_are_asked_again_where_a_step_changes_what_they_see() -> None:
    class Switching(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.flips = False

        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.flips = not self.flips
            return self.model(x) if self.flips else x

    graph, xs = Switching(), torch.randn(9, 3, 2)
    expected = torch.stack([graph.model(x) if k % 2 == 0 else x for k, x in enumerate(xs)])
    assert torch.equal(graph.many(xs), expected)


class Branching(Step):
    """What it computes depends on the learning rate, and on an attribute of the model."""

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss = loss * 2 if self.rates()[0]["lr"] > 0.02 else loss
        loss = loss * 3 if self.model.late else loss
        loss.backward()
        return loss


@pytest.mark.every_case
@pytest.mark.parametrize("late", [False, True], ids=["by torch", "by a function"])
def test_facts_that_schedulers_move(late: bool) -> None:
    xs, ys = batches()

    def side() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        model.late = False
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def scale(number: int) -> float:
            model.late = number > 6
            return 1.0

        kinds = torch.optim.lr_scheduler
        scheduler = kinds.LambdaLR(optimizer, scale) if late else kinds.StepLR(optimizer, 7, 0.1)
        graph = Branching(model, optimizer, scheduler)
        graph.rates = lambda: optimizer.param_groups
        return model, graph

    model, graph = side()
    reference, one_by_one = side()
    expected = torch.stack([one_by_one(x, y) for x, y in zip(xs, ys, strict=True)])
    assert torch.equal(graph.many(xs, ys), expected)
    assert torch.equal(model.weight, reference.weight)
    assert len(one_by_one.builds) == 2
