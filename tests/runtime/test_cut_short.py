"""All or nothing: a step that is cut short leaves everything as it was before."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from monograph.internals.internals import internals_of
from monograph.runtime import executor
from tests.runtime.trip import (
    Own,
    _captured_once,  # noqa: F401
    batch,
    body,
    call,
    make_side,
)
from tests.support import assert_same


class CutShort(TorchDispatchMode):
    """Raises at the n-th op."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.left == 0:
            raise self.error("cut short")
        self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.one_case
@pytest.mark.parametrize("error", [Own, KeyboardInterrupt, RuntimeError])
def test_a_step_cut_short_at_each_op_is_as_if_it_had_not_been(error):
    eager, graph = make_side(False), make_side(True)
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))
    num_builds = len(graph.step.builds)
    at = 0
    while True:
        torch.manual_seed(7)
        before, steps = graph.values(), internals_of(graph.step).store.steps
        try:
            with CutShort(at, error):
                graph.step(*batch(2))
            break
        except error:
            pass
        assert_same(before, graph.values(), f"op {at}")
        assert internals_of(graph.step).store.steps == steps
        assert torch.is_grad_enabled()
        at += 1
    assert at > 45, "the program is larger than that"
    assert len(graph.step.builds) == num_builds
    torch.manual_seed(7)
    eager.step(*batch(2))
    for index in (3, 4):
        assert_same(call(eager, index), call(graph, index))


@pytest.mark.one_case
@pytest.mark.parametrize("error", [Own, KeyboardInterrupt])
def test_the_first_step_cut_short(error):
    eager, graph = make_side(False), make_side(True)
    for at in (0, 5, 20):
        model = {name: t.clone() for name, t in graph.model.state_dict().items()}
        torch.manual_seed(7)
        rng = torch.get_rng_state()
        with pytest.raises(error), CutShort(at, error):
            graph.step(*batch(0))
        assert_same(model, {name: t.clone() for name, t in graph.model.state_dict().items()})
        assert_same(rng, torch.get_rng_state())
        assert all(not e["step"].any() and not e["exp_avg"].any() for e in graph.optimizer.state.values())
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that runs in some files, as a signal could."""

    def __init__(self, at: int, *files: str) -> None:
        self.left, self.files = at, files

    def __enter__(self) -> Interrupts:
        sys.settrace(self._calls)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, _arg: Any) -> Any:
        return self._lines if frame.f_code.co_filename in self.files else None

    def _lines(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1
        return self._lines


def test_an_interrupt_at_any_line_leaves_a_whole_step_or_none():
    """State, random numbers, step count and scheduler move together."""
    files = (executor.__file__, mg.graph.__file__, str(Path(executor.__file__).parent / "rng.py"))
    graph = make_side(True)
    for index in range(2):
        call(graph, index)

    def state() -> dict[str, Any]:
        return {
            **graph.values(),
            "steps": internals_of(graph.step).store.steps,
            "scheduler": graph.scheduler.state_dict(),
        }

    saved = {
        "model": {k: v.clone() for k, v in graph.model.state_dict().items()},
        "scale": graph.model.scale.clone(),
        "optimizer": [{k: v.clone() for k, v in e.items()} for e in graph.optimizer.state.values()],
        "scheduler": graph.scheduler.state_dict(),
        "lr": graph.optimizer.param_groups[0]["lr"],
        "last": graph.model.last,
        "steps": internals_of(graph.step).store.steps,
    }

    def restore() -> None:
        with torch.no_grad():
            graph.model.load_state_dict(saved["model"])
            graph.model.scale.copy_(saved["scale"])
            for entries, kept in zip(graph.optimizer.state.values(), saved["optimizer"], strict=True):
                for key, value in kept.items():
                    entries[key].copy_(value)
        graph.scheduler.load_state_dict(saved["scheduler"])
        graph.optimizer.param_groups[0]["lr"] = saved["lr"]
        graph.model.last = saved["last"]
        internals_of(graph.step).store.steps = saved["steps"]
        torch.manual_seed(7)

    restore()
    before = state()
    graph.step(*batch(2))
    after = state()
    outcomes, at = [], 0
    while True:
        restore()
        try:
            with Interrupts(at, *files):
                graph.step(*batch(2))
            break
        except KeyboardInterrupt:
            pass
        found = state()
        outcome = "after" if found["steps"] == after["steps"] else "before"
        assert_same(after if outcome == "after" else before, found, f"line {at}")
        assert torch.is_grad_enabled()
        assert internals_of(graph.step).store.lock.acquire(blocking=False)
        internals_of(graph.step).store.lock.release()
        outcomes.append(outcome)
        at += 1
    assert {"before", "after"} == set(outcomes)
    assert outcomes == sorted(outcomes, reverse=True), "once ops have run a step is completed"
    assert_same(after, state())


def test_gradients_of_arguments_are_added_once_when_a_commit_is_cut_short(monkeypatch):
    def build(self, x):
        (self.model(x) ** 2).sum().backward()

    torch.manual_seed(0)
    step = type("Step", (mg.Graph,), {"build": build})()
    step.model = model = nn.Linear(4, 3)
    step.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.0))  # its counters are copied
    x = torch.ones(2, 4, requires_grad=True)
    step(x)
    once = x.grad.clone()
    same = x.grad
    copy = torch._foreach_copy_
    cuts = [True]

    def cut(live: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        copy(live[:1], values[:1])
        if cuts.pop() if cuts else False:
            raise KeyboardInterrupt
        copy(live, values)

    monkeypatch.setattr(torch, "_foreach_copy_", cut)
    with pytest.raises(KeyboardInterrupt):
        step(x)
    assert_same(once * 2, x.grad)
    assert x.grad is same, "autograd adds in place"
    step(x)
    assert_same(once * 2 + once, x.grad)


def test_a_scheduler_that_fails_does_so_after_a_whole_step():
    torch.manual_seed(0)
    side = make_side(True)

    class Failing(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch >= 1:
                raise RuntimeError("no more steps")
            return [0.05]

    step = type("Step", (mg.Graph,), {"build": body})()
    step.model, step.trip = side.model, side.trip
    scheduler = Failing(side.optimizer)
    step.add_optimizer(side.optimizer, lr_sch=scheduler)
    with pytest.raises(RuntimeError, match="no more steps"):
        step(*batch(0))
    assert len(step.builds) == 1
    assert [int(e["step"]) for e in side.optimizer.state.values()] == [1] * len(side.optimizer.state)


def test_a_lock_is_free_after_an_error_in_another_thread():
    graph = make_side(True)
    graph.trip.at, graph.trip.error = "after forward", Own("trip")
    raised: list[BaseException] = []

    def work() -> None:
        try:
            graph.step(*batch(0))
        except Own as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(raised) == 1
    graph.trip.at = ""
    eager = make_side(False)
    assert_same(call(eager, 0), call(graph, 0))
