"""A signal at any line where state is written or put back finds all of it, or nothing."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph import cache, compiler
from monograph.capture import captured, traced
from monograph.capture.guards import guards, objects, owned
from monograph.internals import internals
from monograph.runtime import executor
from monograph.state import snapshot
from tests.support import assert_same

Line = tuple[str, int]


class Signals:
    """Sends an interrupt at one line; without that it notes those that run, of these functions or of all."""

    def __init__(self, files: Collection[str], functions: Collection[str], at: Line | None = None) -> None:
        self.files, self.functions, self.at = files, functions, at
        self.lines: dict[Line, None] = {}

    def __enter__(self) -> Signals:
        sys.settrace(self._calls)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code = frame.f_code
        wanted = code.co_filename in self.files and (not self.functions or code.co_name in self.functions)
        return self._lines if wanted else None

    def _lines(self, frame: FrameType, event: str, _arg: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and self.at is None:
            self.lines[line] = None
        elif event == "line" and line == self.at:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return self._lines


class Step(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.count = 0
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        loss = self.model(x).square().sum()
        loss.backward()
        return loss

    def state(self) -> list[Any]:
        (held,) = internals.internals_of(self).registry.optimizers
        momenta = [entries["momentum_buffer"].clone() for entries in held.optimizer.state.values()]
        return [self.count, *(p.detach().clone() for p in self.model.parameters()), *momenta]


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def interrupted(step: Step, files: Collection[str], functions: Collection[str], at: Line) -> None:
    try:
        with Signals(files, functions, at):
            step(X)
    except KeyboardInterrupt:
        pass


def trail(make: Callable[[], Step], calls: int) -> list[list[Any]]:
    step, found = make(), []
    for _ in range(calls):
        found.append(step.state())
        step(X)
    return [*found, step.state()]


@pytest.mark.one_case
@pytest.mark.parametrize("first", range(3))
def test_a_signal_at_each_line_of_a_call_leaves_a_whole_step_or_none(first: int) -> None:
    files = (executor.__file__,)
    _, _, before, after = trail(Step, 3)

    def twice() -> Step:
        step = Step()
        step(X)
        step(X)
        return step

    step = twice()
    with Signals(files, ()) as noted:
        step(X)
    assert len(noted.lines) > 40
    found = []
    for line in list(noted.lines)[first::3]:
        step = twice()
        interrupted(step, files, (), line)
        found.append(step.count == after[0])
        assert_same(after if found[-1] else before, step.state(), f"{line}")
    assert {True, False} == set(found)


FILES = [item.__file__ for item in (cache, captured, compiler, internals, snapshot, traced)]
FUNCTIONS = (
    *("compile_step", "trace_step", "committed", "_commit", "make_build", "_keep", "keep", "_captured"),
    *("roll_back", "restore", "_restore_others", "_put_back"),
)


@pytest.mark.long
def test_a_signal_at_each_line_where_a_build_is_made_leaves_its_traces_with_it_or_none() -> None:
    first, second = trail(Step, 1)
    with Signals(FILES, FUNCTIONS) as noted:
        Step()(X)
    assert len(noted.lines) > 60
    kept = []
    for line in noted.lines:
        step = Step()
        interrupted(step, FILES, FUNCTIONS, line)
        assert_same(first, step.state(), f"{line}")
        assert all(type(item) is nn.Parameter for item in step.model.parameters())
        kept.append(len(step.builds))
        step(X)
        assert_same(second, step.state(), f"{line}")
        assert len(step.builds) == 1
    assert {0, 1} == set(kept)


def look_closer(step: Step) -> None:
    """Something changes that does not count."""
    step.model.seen = object()  # type: ignore[assignment]


def put_anew(step: Step) -> None:
    """Other tensors take the place of the momenta."""
    (held,) = internals.internals_of(step).registry.optimizers
    held.optimizer.load_state_dict(copy.deepcopy(held.optimizer.state_dict()))


@pytest.mark.one_case
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("change", [look_closer, put_anew])
def test_a_signal_at_each_line_where_guards_settle_leaves_a_graph_that_goes_on(
    change: Callable[[Step], None], first: int
) -> None:
    files = [item.__file__ for item in (compiler, guards, objects, owned)]
    functions = (
        *("hold", "_note_restless", "settle", "_arrange", "_arrange_links", "_watch", "_entries_hold"),
        *("bind_anew", "bind"),
    )
    trace = trail(Step, 5)

    def changed() -> Step:
        step = Step()
        for _ in range(3):  # the third time such a dict is looked at otherwise from then on
            step(X)
            change(step)
        return step

    step = changed()
    with Signals(files, functions) as noted:
        step(X)
    assert len(noted.lines) > 30
    for line in list(noted.lines)[first::3]:
        step = changed()
        interrupted(step, files, functions, line)
        for _ in range(5 - step.count):
            step(X)
        assert_same(trace[5], step.state(), f"{line}")
        assert len(step.builds) == 1
