"""Updates in place on `aten`: eager's bits, and a step that is done or has not been, whatever happens."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.runtime.malloc import keep_freed_memory
from monograph.runtime.runner import Runner
from tests.runtime.test_interrupts import Signals
from tests.support import assert_same
from tests.support.seen import Seen, ops_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with all": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD, maximized": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW on lists": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD with all, fused": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    ),
    "Adam with amsgrad, fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, fused=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)
    ).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 5, generator=generator).to(dtype), torch.randn(6, 3, generator=generator).to(dtype)


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All state, in memory of its own."""
    return copy.deepcopy([dict(module.state_dict()), list(optimizer.state_dict()["state"].values())])


def eager_steps(make: Any, count: int, dtype: torch.dtype = torch.float32) -> list[list[Any]]:
    """The state after each of some steps in plain PyTorch, that of before first."""
    module = model(dtype)
    optimizer = make(module.parameters())
    found = [values(module, optimizer)]
    for index in range(count):
        x, y = batch(index, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        found.append(values(module, optimizer))
    return found


class Side:
    """A graph of the model with an optimizer."""

    def __init__(self, make: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model = model(dtype)
        self.optimizer = make(self.model.parameters())
        self.graph = mg.train_graph(self.model, nn.MSELoss(), self.optimizer)
        self.graph.config.backend("aten")  # no other code may take over between two steps

    def values(self) -> list[Any]:
        return values(self.model, self.optimizer)

    @property
    def runner(self) -> Runner:
        return self.graph.builds[-1].executor._runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_updates_in_place_with_eagers_bits(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name == "SGD with all, fused":
        pytest.skip("eager's own kernel gives other momenta from run to run")
    expected = eager_steps(OPTIMIZERS[name], 4, dtype)
    side = Side(OPTIMIZERS[name], dtype)
    places = [item.data_ptr() for item in side.model.parameters()]
    for index in range(4):
        side.graph(*batch(index, dtype))
        assert_same(expected[index + 1], side.values(), f"step {index}")
    assert places == [item.data_ptr() for item in side.model.parameters()]
    if name not in (
        "Rprop",
        "ASGD",
        "AdamW on lists",
    ):  # masks; copies into other state; ops on lists in the program
        outputs = side.graph.builds[-1].program.outputs
        written = {outputs[index].path for index in side.runner.written}
        assert {f"model.{path}" for path, _ in side.model.named_parameters()} <= written


def test_who_looks_at_ops_sees_all_of_them_as_they_run() -> None:
    expected = eager_steps(OPTIMIZERS["AdamW"], 3)
    side = Side(OPTIMIZERS["AdamW"])
    side.graph(*batch(0))
    with Seen() as seen:
        side.graph(*batch(1))
    assert not ops_of(side.graph.builds[0].program) - seen.ops
    assert seen.num_in_place > 5
    assert_same(expected[2], side.values())
    with torch.profiler.profile() as profile:
        side.graph(*batch(2))
    names = {event.name for event in profile.events()}
    assert {"model.3 (forward)", "model.3 (backward)", "optimizer.0 (update)", "aten::addcdiv_"} <= names
    assert_same(expected[3], side.values())


def tail_lines(side: Side, index: int) -> list[tuple[str, int]]:
    """The lines of the functions that write state, as they run in a step."""
    file = side.runner.run.__code__.co_filename  # type: ignore[attr-defined]
    with Signals((file,), ("update", "second_part")) as noted:
        side.graph(*batch(index))
    return list(noted.lines)


@pytest.mark.parametrize("name", ["AdamW", "SGD with all", "AdamW, fused"])
def test_a_signal_at_each_line_of_a_tail_comes_after_the_step(name: str) -> None:
    make = OPTIMIZERS[name]
    expected = eager_steps(make, 4)
    side = Side(make)
    side.graph(*batch(0))
    lines = tail_lines(side, 1)
    assert len(lines) > 8
    saved = copy.deepcopy(side.graph.state_dict())
    for line in lines:
        side.graph.load_state_dict(copy.deepcopy(saved))
        with pytest.raises(KeyboardInterrupt), Signals((line[0],), (), line):
            side.graph(*batch(2))
        assert_same(expected[3], side.values(), f"{line}")
        side.graph(*batch(3))
        assert_same(expected[4], side.values(), f"{line}")


def test_a_signal_at_each_line_before_a_tail_undoes_the_step() -> None:
    make = OPTIMIZERS["AdamW"]
    expected = eager_steps(make, 2)
    side = Side(make)
    side.graph(*batch(0))
    file = side.runner.run.__code__.co_filename  # type: ignore[attr-defined]
    with Signals((file,), ("run", "first_part")) as noted:
        side.graph(*batch(1))
    assert len(noted.lines) > 60
    side = Side(make)
    side.graph(*batch(0))
    for line in list(noted.lines)[::5]:
        file = side.runner.run.__code__.co_filename  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt), Signals((file,), (), (file, line[1])):
            side.graph(*batch(1))
        assert_same(expected[1], side.values(), f"{line}")
    side.graph(*batch(1))
    assert_same(expected[2], side.values())


class OutOfMemory:
    """Raises at the n-th line of a function."""

    def __init__(self, function: str, at: int, error: type[BaseException] = MemoryError) -> None:
        self.function, self.left, self.error = function, at, error

    def __enter__(self) -> None:
        sys.settrace(self._calls)

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, _arg: Any) -> Any:
        return self._lines if frame.f_code.co_name == self.function else None

    def _lines(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise self.error("out of luck")
        return self._lines


def failures(function: str) -> Iterator[OutOfMemory]:
    yield from (OutOfMemory(function, at) for at in (2, 4, 7))
    yield OutOfMemory(function, 5, SystemExit)  # from another thread, say: no signal, which would wait


def test_a_tail_that_fails_is_a_torn_state_until_state_is_loaded() -> None:
    make = OPTIMIZERS["AdamW"]
    expected = eager_steps(make, 2)
    for failure in failures("second_part"):
        side = Side(make)
        side.graph(*batch(0))
        saved = copy.deepcopy(side.graph.state_dict())
        with pytest.raises(mg.TornStateError, match="out of luck"), failure:
            side.graph(*batch(1))
        with pytest.raises(mg.TornStateError, match="cannot go on"):
            side.graph(*batch(1))
        side.graph.load_state_dict(saved)
        side.graph(*batch(1))
        assert_same(expected[2], side.values())


def test_a_failure_before_the_tail_changes_nothing() -> None:
    make = OPTIMIZERS["AdamW"]
    expected = eager_steps(make, 2)
    side = Side(make)
    side.graph(*batch(0))
    for failure in failures("first_part"):
        with pytest.raises((MemoryError, SystemExit), match="out of luck"), failure:
            side.graph(*batch(1))
        assert_same(expected[1], side.values())
    side.graph(*batch(1))
    assert_same(expected[2], side.values())


@pytest.mark.every_case
@pytest.mark.parametrize("rate", [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-300, 3.4e38])
def test_any_number_that_fits_gives_eagers_bits(rate: float) -> None:
    compare_with_rate("SGD with all", rate)


@pytest.mark.every_case
@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 0.0, 1e-300, 3.4e38, 1e300])
def test_any_number_gives_the_bits_of_eagers_fused_update(rate: float) -> None:
    compare_with_rate("AdamW, fused", rate)


def compare_with_rate(name: str, rate: float) -> None:
    """Three steps against eager mode, the second one with another learning rate."""

    def steps(step: Callable[[int], object], optimizer: torch.optim.Optimizer) -> None:
        step(0)
        optimizer.param_groups[0]["lr"] = rate
        step(1)
        optimizer.param_groups[0]["lr"] = 0.01
        step(2)

    module = model()
    optimizer = OPTIMIZERS[name](module.parameters())

    def eager(index: int) -> None:
        x, y = batch(index)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()

    steps(eager, optimizer)
    side = Side(OPTIMIZERS[name])
    steps(lambda index: side.graph(*batch(index)), side.optimizer)
    assert_same(values(module, optimizer), side.values())


def test_a_number_that_does_not_fit_is_refused_before_anything_changes() -> None:
    side = Side(OPTIMIZERS["SGD with all"])
    side.graph(*batch(0))
    before = side.values()
    side.optimizer.param_groups[0]["lr"] = 1e300
    for _ in range(2):
        with pytest.raises(RuntimeError, match="overflow") as raised:
            side.graph(*batch(1))
        assert not isinstance(raised.value, mg.TornStateError)
        assert_same(before, side.values())
    side.optimizer.param_groups[0]["lr"] = 0.1
    side.graph(*batch(1))
    assert_same(eager_steps(OPTIMIZERS["SGD with all"], 2)[2], side.values())


def test_results_that_show_new_state_stay_apart() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(3, 2)
            self.register = torch.zeros(2, 3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            old = self.model.weight.detach().clone()
            self.model(x).square().sum().backward()
            return old

    step = Step()
    for _ in range(3):
        before = step.model.weight.detach().clone()
        returned = step(torch.ones(4, 3))
        assert_same(before, returned)
        assert not torch.equal(before, step.model.weight)


def test_what_a_large_step_frees_is_kept_for_the_next_one() -> None:
    for width, is_large in ((16, False), (600, True)):
        layer = nn.Linear(width, width)
        graph = mg.train_graph(layer, nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
        graph(torch.randn(8, width), torch.randn(8, width))
        told = "the process keeps up to" in graph.explain()
        assert told == (is_large and keep_freed_memory(1))


class Fused(nn.Module):
    """A model with a fused optimizer, and a step that may read what that updates."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.model = read, model()
        self.mean = nn.Parameter(torch.zeros(33, 5), requires_grad=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        weight: Any = self.model[0].weight  # type: ignore[index]
        old = weight.detach().view(-1)
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        read: dict[str, Callable[[], Any]] = {
            "nothing": lambda: None,
            "new weights": lambda: weight.detach() * 1,
            "an average": lambda: self.mean.lerp_(weight.detach(), 0.1).sum(),
            "old weights": lambda: old,
        }
        return loss.detach(), read[self.read]()


@pytest.mark.every_case
@pytest.mark.parametrize("read", ["nothing", "new weights", "an average", "old weights"])
def test_a_fused_update_is_in_place_where_nothing_else_reads_it(read: str) -> None:
    class Step(mg.Graph):
        def __init__(self, inner: Fused) -> None:
            super().__init__()
            self.inner = inner
            self.add_optimizer(inner.optimizer, manual=True)

        def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.inner(x, y)

    plain, traced = Fused(read), Fused(read)
    step = Step(traced)
    for index in range(3):
        assert_same(plain(*batch(index)), step(*batch(index)), f"step {index}")
        plain.optimizer.zero_grad()
        assert_same(values(plain, plain.optimizer), values(traced, traced.optimizer), f"step {index}")
    build = step.builds[-1]
    written = {build.program.outputs[index].path for index in build.executor._runner.written}
    assert ("inner.model.0.weight" in written) == (read == "nothing")
