"""Ints among the arguments: where arithmetic on them stays arithmetic, one build serves all from the second value on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same

Program = Callable[["Model", torch.Tensor, Any], torch.Tensor]
STEPS = range(1, 13)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.ones(60, 4))
        self.beta, self.pair, self.last = 0.5, (0.5, 1.0), None


class TrainStep(mg.Graph):
    def __init__(self, program: Program, backend: str = "aten") -> None:
        super().__init__()
        self.model, self.program = Model(), program
        self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.config.backend(backend)

    def build(self, x: torch.Tensor, n: Any) -> Any:
        loss = self.program(self.model, x, n)
        loss.backward()
        return loss, n


def assert_trains_alike(program: Program, values: Sequence[Any], backend: str = "aten") -> TrainStep:
    """The step, which has eager's bits at each value: loss, what is returned, parameters, optimizer state, attributes."""
    plain, step = Model(), TrainStep(program, backend)
    model, optimizer = step.model, torch.optim.Adam(plain.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(1)
    for value in values:
        x = torch.randn(8, 4, generator=source)
        optimizer.zero_grad()
        loss = program(plain, x, value)
        loss.backward()
        optimizer.step()
        got, returned = step(x, value)
        assert_same(loss.detach(), got.detach(), f"loss at {value}")
        assert (returned, type(returned)) == (value, type(value))
        assert (plain.last, type(plain.last)) == (model.last, type(model.last))
        assert_same(plain.state_dict(), model.state_dict(), f"state after {value}")
        stepped = step.state_dict()["optimizer.0"]["state"]
        assert_same(_by_place(optimizer.state_dict()["state"]), _by_place(stepped), f"Adam at {value}")
    return step


def _by_place(state: dict[Any, Any]) -> list[Any]:
    return list(state.values())


def mean(m: Model, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).mean()


def stored(m: Model, x: torch.Tensor, n: int) -> torch.Tensor:
    m.last = n
    return mean(m, x) * n


ARITHMETIC: dict[str, tuple[Program, Sequence[Any]]] = {
    "warm-up": (lambda m, x, n: mean(m, x) * min(1.0, n / 100), STEPS),
    "bias correction": (lambda m, x, n: mean(m, x) / (1 - 0.9**n), STEPS),
    "cosine": (lambda m, x, n: mean(m, x) * 0.5 * (1 + math.cos(math.pi * n / 50)), STEPS),
    "exponential": (lambda m, x, n: mean(m, x) * math.exp(-n / 10), STEPS),
    "noam": (lambda m, x, n: mean(m, x) * min(n**-0.5, n * 4000**-1.5), STEPS),
    "stairs": (lambda m, x, n: mean(m, x) * 0.5 ** (n // 3), STEPS),
    "factor": (lambda m, x, n: (m.linear(x) * n).mean() + n % 7, STEPS),
    "full": (lambda m, x, n: mean(m, x) * torch.full((), n) + torch.full(size=(), fill_value=n), STEPS),
    "tensor": (lambda m, x, n: mean(m, x) * torch.tensor(n), STEPS),
    "kept": (stored, STEPS),
    "unread": (lambda m, x, n: mean(m, x), STEPS),
    "kind": (lambda m, x, n: mean(m, x) * (n if isinstance(n, int) and type(n) is int else 0), STEPS),
    "negative": (lambda m, x, n: mean(m, x) * n, [-n for n in range(12)]),
    "wide": (lambda m, x, n: (m.linear(x) + n * 3).mean(), [2**31 + n for n in range(12)]),
    "wider": (lambda m, x, n: (m.linear(x) + n).mean(), [2**53 + n for n in range(6)]),
    "without bounds": (lambda m, x, n: mean(m, x) + n / 3, [2**70 + n for n in range(6)]),
    "nested": (lambda m, x, n: mean(m, x) * n["at"][0] / n["of"], [{"at": (n,), "of": 12} for n in STEPS]),
    "two": (lambda m, x, n: mean(m, x) * n[0] / n[1], [(n, 2 * n) for n in STEPS]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", list(ARITHMETIC))
def test_one_build_serves_all_values(name: str) -> None:
    step = assert_trains_alike(*ARITHMETIC[name])
    assert len(step.builds) == 2, step.builds


@pytest.mark.long
@pytest.mark.parametrize("name", ["bias correction", "factor", "wide", "wider", "two", "kept"])
def test_compiled_updates_have_the_bits(name: str) -> None:
    program, values = ARITHMETIC[name]
    step = assert_trains_alike(program, values, "exact")
    assert len(step.builds) == (len(values) if name == "wider" else 2), (
        step.builds
    )  # 2**53 is no float's neighbour


@pytest.mark.long
@pytest.mark.parametrize("name", ["cosine", "bias correction"])
def test_compiled_steps(name: str) -> None:
    program, values = ARITHMETIC[name]
    plain, step = Model(), TrainStep(program, "inductor")
    x = torch.randn(8, 4)
    for n in values[:4]:
        assert torch.allclose(step(x, n)[0], program(step.model, x, n), rtol=1.0, atol=1.0)
    assert len(step.builds) == 2, step.builds
    assert step.verify(x, 9).ok
    assert plain.beta == 0.5


DECIDING: dict[str, tuple[Program, int]] = {
    "parity": (lambda m, x, n: mean(m, x) if n % 2 == 0 else m.linear(x).sum(), 3),
    "now and then": (lambda m, x, n: mean(m, x) + (m.table.sum() if n % 5 == 0 else 0), 3),
    "loop": (lambda m, x, n: sum((mean(m, x) for _ in range(n % 3)), mean(m, x)), 4),
    "among": (lambda m, x, n: mean(m, x) * (2 if n in (4, 8) else 1), 4),
}


@pytest.mark.parametrize("name", list(DECIDING))
def test_each_branch_has_a_build(name: str) -> None:
    program, builds = DECIDING[name]
    step = assert_trains_alike(program, [*STEPS, *STEPS])  # the second time each branch finds its build
    assert len(step.builds) == builds, step.builds


TAKING: dict[str, Program] = {
    "slice": lambda m, x, n: mean(m, x) + m.table[:n].sum(),
    "index": lambda m, x, n: mean(m, x) + m.table[n].sum(),
    "entry": lambda m, x, n: mean(m, x) * dict.fromkeys(range(60), 0.5)[n],
    "text": lambda m, x, n: mean(m, x) * len(f"step {n}"),
    "range": lambda m, x, n: mean(m, x) * sum(range(n)),
    "places": lambda m, x, n: m.linear(x.roll(n, 0)).mean() * n,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", list(TAKING))
def test_each_value_that_is_taken_has_a_build(name: str) -> None:
    step = assert_trains_alike(TAKING[name], [*STEPS, *STEPS])
    assert len(step.builds) == len(STEPS), step.builds
    assert "argument n is 12 (int); the graph was built for 1 (int); the value of n is taken at" in (
        step.builds[-1].reason
    )
    assert "test_int_arguments.py" in step.builds[-1].reason


def test_a_value_that_is_taken_at_first_alone() -> None:
    def program(m: Model, x: torch.Tensor, n: int) -> torch.Tensor:
        return mean(m, x) * (len(f"{n}") if n < 5 else n)

    step = assert_trains_alike(program, range(40))
    assert len(step.builds) < 12, step.builds


def test_code_that_asks_whether_a_number_is_plain() -> None:
    def program(m: Model, x: torch.Tensor, n: int) -> torch.Tensor:
        try:
            json.dumps(n)
        except TypeError:
            return m.linear(x).sum() * n
        return mean(m, x) * n

    step = assert_trains_alike(program, [*STEPS, *STEPS])
    assert len(step.builds) == len(STEPS), step.builds


def test_a_batch_varies_beside_a_step() -> None:
    step = TrainStep(ARITHMETIC["bias correction"][0])
    plain = Model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for n in range(1, 12):
        x = torch.randn(2 + n % 4, 4)
        optimizer.zero_grad()
        loss = ARITHMETIC["bias correction"][0](plain, x, n)
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), step(x, n)[0].detach(), f"loss at {n}")
    assert_same(plain.state_dict(), step.model.state_dict(), "state")
    assert len(step.builds) == 2, step.builds


def test_bools_stay() -> None:
    step = assert_trains_alike(lambda m, x, n: mean(m, x) * (2 if n else 1), [True, False, True, 1, 0, 1])
    assert len(step.builds) == 4, step.builds


def test_accumulation_takes_ints() -> None:
    step = TrainStep(lambda m, x, n: mean(m, x) * n / 10)
    step.config.set_gradient_accumulation_steps(2)
    for n in STEPS:
        step(torch.randn(8, 4), n)
    assert len(step.builds) == 2, step.builds


def test_the_limit_of_builds_is_no_reason_to_stay() -> None:
    step = TrainStep(ARITHMETIC["factor"][0])
    step.config.max_builds(1)
    x = torch.randn(8, 4)
    step(x, 1)
    with pytest.raises(mg.CaptureError, match="has 1 build and would need another"):
        step(x, 2)
    step.config.max_builds(None)
    for n in STEPS:
        step(x, n)
    assert len(step.builds) <= 3, step.builds


# --- beside calls ------------------------------------------------------------------------------------------------


class Scaled(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Model().linear

    def build(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        return self.linear(x) * (n / 4 if n % 3 else 2.0), n + 1


def test_proofs_and_loops_know_them() -> None:
    graph, x = Scaled(), torch.randn(3, 4)
    for n in (1, 2, 4):
        graph(x, n)
    assert graph.verify(x, 5).ok
    many, _ = graph.many(torch.stack([x, x]), 5)
    assert_same(torch.stack([graph(x, 5)[0]] * 2), many, "many")


def test_artifacts_take_them(tmp_path: Any) -> None:
    graph, x = Scaled(), torch.randn(3, 4)
    for n in (1, 2, 3):
        graph(x, n)
    loaded = mg.load(mg.save(graph, tmp_path / "scaled"))
    assert "n: int" in repr(loaded)
    for n in (1, 5, 6, -2, 2**40):
        expected, counted = graph(x, n)
        got, returned = loaded(x, n)
        assert_same(expected.detach(), got.detach(), f"at {n}")
        assert (counted, int) == (returned, type(returned))
    for wrong in (True, 2.0, "2"):
        with pytest.raises(mg.SignatureError, match="the artifact takes an int"):
            loaded(x, wrong)


def test_what_cannot_take_them_says_so(tmp_path: Any) -> None:
    graph, x = Scaled(), torch.randn(3, 4)
    for n in (1, 2):
        graph(x, n)
    with pytest.raises(
        mg.ArtifactError, match="build() takes an int that differs between calls".replace("()", r"\(\)")
    ):
        mg.export_onnx(graph, tmp_path / "scaled.onnx")
    products = TrainStep(lambda m, x, n: mean(m, x) * (n * n))
    for n in (2, 3):
        products(x, n)
    with pytest.raises(mg.ArtifactError, match="the step multiplies ints at"):
        mg.save(products, tmp_path / "products")


# --- and numbers elsewhere ---------------------------------------------------------------------------------------


class Annealed(mg.Graph):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.model, self.read = Model(), read
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.add_optimizer(optimizer)
        self.betas, self.listed, self.named = (0.9, 0.5), [0.9, 0.5], {"beta": 0.5}
        self.space = SimpleNamespace(betas=(0.9, 0.5))
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model.linear(x).mean() * self.read(self)
        loss.backward()
        return loss

    def anneal(self, n: int) -> None:
        self.schedule.step()
        self.betas, self.listed, self.named = (0.9, 0.5 + n), [0.9, 0.5 + n], {"beta": 0.5 + n}
        self.space.betas = (0.9, 0.5 + n)


READS: dict[str, Callable[[Any], float]] = {
    "last_lr": lambda g: g.schedule.get_last_lr()[0],
    "last_epoch": lambda g: g.schedule.last_epoch,
    "tuple": lambda g: g.betas[1],
    "unpacked": lambda g: sum(g.betas),
    "list": lambda g: g.listed[1],
    "dict": lambda g: g.named["beta"],
    "tuple elsewhere": lambda g: g.space.betas[1],
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", list(READS))
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_numbers_in_containers_that_are_replaced(name: str) -> None:
    step = Annealed(READS[name])
    for n in range(1, 9):
        x = torch.randn(8, 4)
        expected = step.model.linear(x).mean() * READS[name](step)
        assert_same(expected.detach(), step(x).detach(), f"at {n}")
        step.anneal(n)
    assert len(step.builds) == 2, step.builds
    assert step.verify(torch.randn(8, 4)).ok


def test_a_container_that_the_step_changes_is_no_number() -> None:
    step = Annealed(lambda g: g.listed[1])

    def build(x: torch.Tensor) -> torch.Tensor:
        step.listed[0] += 1.0
        loss = step.model.linear(x).mean() * step.listed[0] * step.listed[1]
        loss.backward()
        return loss

    step.build = build  # type: ignore[method-assign]
    for n in range(1, 6):
        step.listed = [float(n), 0.5 * n]
        x = torch.randn(8, 4)
        expected = step.model.linear(x).mean() * (n + 1.0) * (0.5 * n)
        assert_same(expected.detach(), step(x).detach(), f"at {n}")
        assert step.listed == [n + 1.0, 0.5 * n]


def test_what_is_stored_is_the_argument_though_inputs_before_it_are_gone() -> None:
    step = assert_trains_alike(
        stored, [n / 4 for n in STEPS]
    )  # no gradient of the table: Adam has no state of it
    assert len(step.builds) == 1, step.builds
