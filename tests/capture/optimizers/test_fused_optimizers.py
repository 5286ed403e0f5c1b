"""Fused optimizers: every number of a param group moves without a new build, and all bits are those of eager's kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg
from tests.support import assert_same

STEPS = 5
ROWS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {}),
    (AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    (AdamW, {"lr": 1}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (SGD, {"lr": torch.tensor(0.01), "momentum": 0.9}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any, scaler: Any) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(model: nn.Module, kind: type[Optimizer], options: dict[str, Any]) -> Optimizer:
    """Two param groups, whose numbers differ."""
    first, *others = model.parameters()
    groups = [{"params": others}, {"params": [first], "weight_decay": 0.2}]
    return kind(groups, fused=True, **copy.deepcopy({"lr": 0.01} | options))  # type: ignore[call-arg]


def scheduler_of(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=1.5, growth_interval=2)


def move(optimizer: Optimizer, step: int) -> None:
    """Every number but lr, which the scheduler moves."""
    for group in optimizer.param_groups:
        for key in ("weight_decay", "momentum", "eps", "lr_decay"):
            if group.get(key):
                group[key] *= 1.0 - 0.1 * step
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.999 - 0.001 * step)


def batches(infinite: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(STEPS)
    ]
    for step in infinite:
        made[step][0][0, 0] = float("inf")
    return made


def state_of(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def plainly(make: Callable[[nn.Module], Optimizer], scaler: Any, infinite: tuple[int, ...]) -> list[Any]:
    """Plain PyTorch: the state after each step."""
    model = model_of()
    optimizer, trail = make(model), []
    scheduler = scheduler_of(optimizer)
    for step, (x, y) in enumerate(batches(infinite)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        trail.append(state_of(model, optimizer))
        move(optimizer, step)
    return trail


def as_graph(
    make: Callable[[nn.Module], Optimizer],
    scaler: Any,
    infinite: tuple[int, ...],
    backend: str = "aten",
    *,
    taken_apart: bool = False,
) -> tuple[list[Any], Step]:
    model = model_of()
    optimizer, trail = make(model), []
    graph = Step(model, optimizer, scheduler_of(optimizer), scaler)
    graph.config.backend(backend)
    if taken_apart:
        graph.config.enable_pass("fused_to_single")
    for step, batch in enumerate(batches(infinite)):
        graph(*batch)
        trail.append(state_of(model, optimizer))
        move(optimizer, step)
    return trail, graph


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_moving_numbers_need_no_build(kind: type[Optimizer], options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        return optimizer_of(model, kind, options)

    trail, graph = as_graph(make, None, ())
    assert_same(plainly(make, None, ()), trail)
    assert [build.reason for build in graph.builds] == ["first call"]


@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("kind", "options"), [row for row in ROWS if row[0] is not SGD])
def test_moving_numbers_with_a_scaler_that_skips(kind: type[Optimizer], options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        return optimizer_of(model, kind, options)

    trail, graph = as_graph(make, scaler_of(), (2, 3))
    assert_same(plainly(make, scaler_of(), (2, 3)), trail)
    assert [build.reason for build in graph.builds] == ["first call"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9})])
def test_compiled_steps_take_moving_numbers(
    kind: type[Optimizer], options: dict[str, Any], scaled: bool
) -> None:
    def make(model: nn.Module) -> Optimizer:
        return optimizer_of(model, kind, options)

    scaler, infinite = (scaler_of, (2,)) if scaled else (lambda: None, ())
    expected = plainly(make, scaler(), infinite)
    trail, graph = as_graph(make, scaler(), infinite, "inductor")
    assert [(build.reason, build.backend) for build in graph.builds] == [("first call", "inductor")]
    for (model, optimizer), (compiled, other) in zip(expected, trail, strict=True):
        torch.testing.assert_close(compiled, model)
        torch.testing.assert_close(other["state"], optimizer["state"])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "options"), [*ROWS, (SGD, {"momentum": 0.9, "dampening": 0.5})])
def test_formulas_for_single_tensors_give_what_the_fused_ones_give(
    kind: type[Optimizer], options: dict[str, Any], scaled: bool
) -> None:
    if scaled and options.get("dampening"):
        pytest.skip("its first step makes state, and a scaler may skip it")

    def make(model: nn.Module) -> Optimizer:
        return optimizer_of(model, kind, options)

    scaler, infinite = (scaler_of, (2, 3)) if scaled else (lambda: None, ())
    trail, graph = as_graph(make, scaler(), infinite, taken_apart=True)
    assert not any("fused" in str(node.target) for node in graph.builds[-1].program.ops())
    for (model, optimizer), (expected, other) in zip(trail, plainly(make, scaler(), infinite), strict=True):
        torch.testing.assert_close(model, expected)
        torch.testing.assert_close(optimizer["state"], other["state"])


DECAYS = (0.0, 0.1, 0.2, 0.0, 0.3)
DECAYING: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (AdamW, {}),
    (SGD, {}),
    (SGD, {"momentum": 0.9}),
    (Adagrad, {}),
]


def with_decays(kind: type[Optimizer], options: dict[str, Any], backend: str | None) -> tuple[list[Any], Any]:
    """The state after each step of a weight decay that is zero now and then; in plain PyTorch without a backend."""
    model = model_of()
    optimizer: Optimizer = kind(model.parameters(), lr=0.01, fused=True, weight_decay=0.0, **options)  # type: ignore[call-arg]
    graph = Step(model, optimizer, None, None)
    if backend is not None:
        graph.config.backend(backend)
    trail = []
    for decay, batch in zip(DECAYS, batches(), strict=True):
        optimizer.param_groups[0]["weight_decay"] = decay
        (graph.eager if backend is None else graph)(*batch)
        trail.append(state_of(model, optimizer))
    return trail, graph.builds


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize(("kind", "options"), DECAYING)
def test_a_weight_decay_of_zero_has_a_build_of_its_own(
    kind: type[Optimizer], options: dict[str, Any], backend: str
) -> None:
    expected, _ = with_decays(kind, options, None)
    trail, builds = with_decays(kind, options, backend)
    assert [build.backend for build in builds] == [backend] * 2
    assert "weight_decay" in builds[1].reason
    decay = next(node for node in builds[0].program.graph.nodes if "weight_decay" in node.name)
    assert not decay.users
    if backend == "aten":
        assert_same(expected, trail)
    for (model, optimizer), (other, moved) in zip(expected, trail, strict=True):
        torch.testing.assert_close(other, model)
        torch.testing.assert_close(moved["state"], optimizer["state"])


def test_a_weight_decay_that_the_step_computes_is_no_branch() -> None:
    def trail_of(*, eager: bool) -> list[Any]:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.01, fused=True)

        class Computing(Step):
            def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                loss = super().build(x, y)
                optimizer.param_groups[0]["weight_decay"] = loss.detach().item()
                return loss

        graph, trail = Computing(model, optimizer, None, None), []
        for batch in batches():
            (graph.eager if eager else graph)(*batch)
            trail.append(state_of(model, optimizer))
        return trail

    assert_same(trail_of(eager=True), trail_of(eager=False))


def test_a_number_that_moves_is_an_input_of_the_op() -> None:
    _, graph = as_graph(lambda model: optimizer_of(model, AdamW, {}), None, ())
    text = str(graph.builds[0].program)
    assert "lr=optimizer_0__group0__lr" in text
    assert "weight_decay=optimizer_0__group1__weight_decay" in text


class Sharing(nn.Module):
    """One of two parameters is the gradient of the other one, and `first` says which of them the update begins with."""

    def __init__(self, first: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        order = [self.b, self.a] if first == "b" else [self.a, self.b]
        self.optimizer = SGD(order, lr=0.1, momentum=0.9, fused=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        (self.b * x).sum().backward()
        self.a.grad = self.b.detach()
        self.optimizer.step()
        return self.b.detach() * x


@pytest.mark.every_case
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_gradient_that_is_another_parameter(first: str) -> None:
    """Eager's kernel goes from one parameter to the next, and finds there what it has just written."""

    class Own(mg.Graph):
        def __init__(self, inner: Sharing) -> None:
            super().__init__()
            self.inner = inner
            self.add_optimizer(inner.optimizer, manual=True)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    plain, traced = Sharing(first), Sharing(first)
    graph = Own(traced)
    for step in range(3):
        x = torch.full((3,), 1.0 + step)
        assert_same(plain(x), graph(x), f"step {step}")
        assert_same([plain.a, plain.b], [traced.a, traced.b], f"step {step}")
