"""Signal handlers during a capture find the state itself. What they raise comes out as it is, and the next call captures."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import monograph as mg
from monograph import compiler
from monograph.internals.internals import internals_of
from tests.support import assert_same


class OfHandler(RuntimeError):
    pass


@contextlib.contextmanager
def handling(number, function):
    """Inside, this is what handles a signal."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture(autouse=True)
def handler():
    """One that raises; afterwards it is the one that is installed."""

    def run(_number, _frame):
        raise OfHandler(
            "is not supported for tensor subclasses: SymInt"
        )  # as torch would say of a value that is read

    with handling(signal.SIGALRM, run):
        yield run
        assert signal.getsignal(signal.SIGALRM) is run


class Step(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 3)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.during = None

    def build(self, x):
        loss = self.model(x).square().sum()
        if self.during is not None:
            self.during()
        loss.backward()
        return loss


def check(step) -> None:
    """The capture failed with the handler's own error, and left nothing behind."""
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    x = torch.ones(2, 3)
    with pytest.raises(OfHandler, match="SymInt"):
        step(x)
    assert not step.is_compiled
    assert_same(before, dict(step.model.state_dict()))
    step.during = None
    assert internals_of(step).registry.optimizers[0].optimizer.state_dict()["state"] == {}


def test_in_build():
    step = Step()
    step.during = lambda: signal.raise_signal(signal.SIGALRM)
    check(step)


@pytest.mark.one_case
@pytest.mark.parametrize("times", [1, 5, 20])
def test_in_torch(monkeypatch, times):
    """Where torch takes errors for those of a fake kernel."""
    step, calls, plain = Step(), [], FakeTensorMode._dispatch_impl

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == times:
            signal.raise_signal(signal.SIGALRM)
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTensorMode, "_dispatch_impl", interrupted)
        check(step)
    assert len(calls) >= times
    step(torch.ones(2, 3))
    assert step.is_compiled


def test_what_is_swallowed_comes_out(monkeypatch):
    step, plain, told = Step(), compiler.run_passes, []

    def swallowing(*args, **options):
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception as error:
            told.append(error)
        return plain(*args, **options)

    monkeypatch.setattr(compiler, "run_passes", swallowing)
    # the frame that catches it is of torch, or of Monograph
    monkeypatch.setattr("monograph.capture.process.signals.is_user_file", lambda name: False)
    check(step)
    assert len(told) == 1


def test_a_handler_that_the_step_sets_itself_runs_at_once(handler):
    step = Step()

    def within_limits():
        before = signal.signal(signal.SIGALRM, lambda number, frame: handler(number, frame))
        try:
            with pytest.raises(OfHandler):
                signal.raise_signal(signal.SIGALRM)
            with contextlib.suppress(OfHandler):
                signal.raise_signal(signal.SIGALRM)
        finally:
            signal.signal(signal.SIGALRM, before)

    step.during = within_limits
    step(torch.ones(2, 3))
    assert step.is_compiled


def test_handlers_run_once_behind_the_trace(monkeypatch):
    """They find no stand-in, wherever the signal has come, and make none."""
    step, plain, kinds = Step(), FakeTensorMode._dispatch_impl, []
    optimizer = internals_of(step).registry.optimizers[0].optimizer

    def save(_number, _frame):
        state = [item for entries in optimizer.state.values() for item in entries.values()]
        copies = [tensor.clone() for tensor in step.model.state_dict().values()]
        kinds.append({*map(type, [*step.model.state_dict().values(), *state, *copies, torch.ones(1)])})

    def interrupted(self, *args):
        signal.raise_signal(signal.SIGALRM)
        return plain(self, *args)

    with handling(signal.SIGALRM, save):
        monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", interrupted)
        step.during = lambda: signal.raise_signal(signal.SIGALRM)
        step(torch.ones(2, 3))
    assert step.is_compiled
    assert kinds
    assert set().union(*kinds) == {torch.Tensor}


def test_each_waiting_handler_runs_also_behind_one_that_raises():
    step, heard = Step(), []

    def during():
        for _ in range(3):
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
        assert not heard

    step.during = during
    with handling(signal.SIGUSR1, lambda number, frame: heard.append(number)):
        check(step)
    assert heard == [signal.SIGUSR1]


def test_an_interrupt_stops_a_trace_at_once():
    step, reached = Step(), []

    def during():
        signal.raise_signal(signal.SIGINT)
        reached.append(True)

    step.during = during
    # a job in the background ignores interrupts
    with handling(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        step(torch.ones(2, 3))
    assert not reached
    assert not step.is_compiled


def test_in_the_first_run(monkeypatch, caplog):
    caplog.set_level("INFO", "monograph")
    step = Step()
    step.compile(mg.spec((2, 3)))
    monkeypatch.setattr(step.builds[0].executor, "run", lambda *args: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(OfHandler):
        step(torch.ones(2, 3))
    assert "real tensors" not in caplog.text
