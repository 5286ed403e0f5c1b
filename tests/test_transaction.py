"""All or nothing: a capture that fails and a step that is cut short leave everything as it was before."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import monograph as mg
from monograph import compiler
from monograph.runtime import executor
from monograph.state import snapshot as transaction
from tests.support import assert_same


class Own(Exception):
    """An exception of the user's own."""


@dataclass
class Trip:
    """Where build() fails, and by what."""

    at: str = ""
    error: BaseException | None = None

    def __call__(self, here: str) -> None:
        torch.set_grad_enabled(torch.is_grad_enabled())  # functions of torch that look at all that is around
        if self.at == here:
            raise self.error


class Model(nn.Module):
    """A bit of everything that a capture touches."""

    def __init__(self, trip: Trip) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3, bias=False)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.ones(6)
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"a": 1}
        self.last: Any = None
        self.note = "before"
        self.trip = trip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.fc(x)).relu()) * self.scale.clone()
        self.count = self.count + 1
        self.scale.mul_(1.01)
        self.last = hidden.detach()
        self.fresh = hidden.detach() * 2
        self.note = "after"
        if self.trip.at:
            self.history.append(hidden)
            self.table["hidden"] = hidden
        self.trip("in forward")
        return self.head(hidden)


class TrippedAdam(torch.optim.AdamW):
    """Fails in the middle of its step: some parameters are updated, the rest are not."""

    def __init__(self, parameters: Any, trip: Trip) -> None:
        super().__init__(parameters, lr=0.05, foreach=False)
        self.trip = trip

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._init_group(*args, **kwargs)
        self.trip("in step")
        return made


@dataclass
class Side:
    """The same things for plain PyTorch and for a graph."""

    trip: Trip
    model: Model
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: Any = None
    calls: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Everything that a step changes, cloned."""
        return {
            "model": {name: t.clone() for name, t in self.model.state_dict().items()},
            "scale": self.model.scale.clone(),
            "last": None if self.model.last is None else self.model.last.clone(),
            "optimizer": [
                {k: v.clone() for k, v in entries.items()} for entries in self.optimizer.state.values()
            ],
            "lr": self.optimizer.param_groups[0]["lr"],
            "epoch": self.scheduler.last_epoch,
            "rng": torch.get_rng_state(),
        }


def body(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    trip = self.trip
    trip("at start")
    if trip.at:
        disturb(self)
    loss = functional.cross_entropy(self.model(x), y)
    trip("after forward")
    loss.backward()
    if trip.at == "after backward":
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
    trip("after backward")
    return loss


def disturb(self: Any) -> None:
    """What a build() may do to the world before it fails."""
    random.random()
    np.random.rand()
    self.model.register_forward_hook(lambda module, args, out: out)
    self.model.fc.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    self.model.fc.weight.register_hook(lambda gradient: gradient)
    self.model.dropout.p = 0.9
    self.model.extra = nn.Linear(2, 2)
    self.model.norm.eval()
    self.optimizers[0].param_groups[0]["weight_decay"] = 7.0
    self.optimizers[0].zero_grad()


def make_side(graph: bool) -> Side:
    torch.manual_seed(0)
    trip = Trip()
    model = Model(trip)
    optimizer = TrippedAdam(model.parameters(), trip)
    side = Side(trip, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    if graph:
        step = type("Step", (mg.Graph,), {"build": body})()
        step.model, step.trip = model, trip
        step.add_optimizer(optimizer, lr_sch=side.scheduler)
        step.optimizers = [optimizer]
        side.step = step
    else:

        class Plain:
            pass

        plain = Plain()
        plain.model, plain.trip, plain.optimizers = model, trip, [optimizer]

        def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = body(plain, x, y)
            optimizer.step()
            optimizer.zero_grad()
            side.scheduler.step()
            return loss

        side.step = call
    return side


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def call(side: Side, index: int) -> dict[str, Any]:
    torch.manual_seed(100 + index)
    loss = side.step(*batch(index))
    return {"loss": loss.detach().clone(), **side.values()}


# --- everything that a capture could touch, by identity --------------------------------------------------------------


def table(items: dict[Any, Any]) -> list[Any]:
    return [(key, id(value)) for key, value in items.items()]


def world(side: Side) -> dict[str, Any]:
    """What must be the same after a capture that failed. Ids of objects that live on, and clones of values."""
    model, optimizer = side.model, side.optimizer
    modules = {
        path: {
            "attributes": table(vars(module)),
            **{
                name: table(value) if isinstance(value, dict) else list(map(id, value))
                for name, value in vars(module).items()
                if isinstance(value, (dict, list))
            },
        }
        for path, module in model.named_modules()
    }
    parameters = {
        name: (
            id(p),
            p.data_ptr(),
            p._version,
            p.requires_grad,
            id(p.grad),
            p.dtype,
            len(p._backward_hooks or ()),
        )
        for name, p in model.named_parameters()
    }
    return {
        "modules": modules,
        "parameters": parameters,
        "gradients": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "values": side.values(),
        "optimizer": table({k: v for k, v in vars(optimizer).items() if k != "defaults"}),
        "groups": [
            table({k: v for k, v in g.items() if not isinstance(v, float)}) for g in optimizer.param_groups
        ],
        "numbers": [{k: v for k, v in g.items() if isinstance(v, float)} for g in optimizer.param_groups],
        "params": [list(map(id, g["params"])) for g in optimizer.param_groups],
        "state": [(id(key), table(entries)) for key, entries in optimizer.state.items()],
        "scheduler": dict(side.scheduler.state_dict()),
        "graph": table({k: v for k, v in vars(side.step).items() if not k.startswith("_")}),
        "builds": len(side.step.builds),
        "random": (random.getstate(), np.random.get_state()[1].tolist()),
        "modes": (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._len_torch_function_stack(),
            len(_get_current_dispatch_mode_stack()),
        ),
        "patches": patches(),
    }


def patches() -> list[int]:
    """The pieces of torch and of the user's classes that a trace replaces."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    adafactor = sys.modules.get("torch.optim._adafactor")
    return [
        *(
            id(nn.Module.__dict__.get(name))
            for name in ("__call__", "__init__", "__getattribute__", "__setattr__")
        ),
        *(
            id(torch.optim.Optimizer.__dict__.get(name))
            for name in ("__getattribute__", "__setattr__", "step")
        ),
        *(id(mg.Graph.__dict__.get(name)) for name in ("__getattribute__", "__setattr__")),
        *(id(Trip.__dict__.get(name)) for name in ("__getattribute__", "__setattr__")),
        id(torch.random.default_generator),
        id(getattr(checkpoint, "CheckpointFunction", None)) if checkpoint else 0,
        id(vars(adafactor).get("max")) if adafactor else 0,
    ]


WHERE = ["at start", "in forward", "after forward", "after backward", "in step"]
CUTS = [
    *[(where, ValueError("trip"), after) for where in WHERE for after in (0, 2)],
    *[(where, KeyboardInterrupt("trip"), 2) for where in WHERE],
    ("after backward", SystemExit("trip"), 0),
    ("in step", mg.CaptureError("trip"), 0),
]


@pytest.fixture(autouse=True)
def _captured_once():
    """The first capture of a process imports parts of torch, which are then there to stay."""
    step = type("Step", (mg.Graph,), {"build": lambda self, x: x + 1})()
    step(torch.ones(1))
    random.seed(1)
    np.random.seed(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("where", "error", "after"),
    CUTS,
    ids=lambda item: type(item).__name__ if isinstance(item, BaseException) else None,
)
def test_a_capture_that_fails_changes_nothing_and_can_be_tried_again(where, error, after):
    eager, graph = make_side(False), make_side(True)
    for index in range(after):
        assert_same(call(eager, index), call(graph, index), f"call {index}")
    graph.model(batch(9)[0]).sum().backward()  # gradients of the user's own
    eager.model(batch(9)[0]).sum().backward()
    graph.model.last = eager.model.last = None
    graph.trip.at, graph.trip.error = where, error
    torch.manual_seed(7)
    before = world(graph)
    with pytest.raises(type(error), match="trip") as caught:
        graph.step(*batch(after))
    assert caught.value is error
    assert_same(before, world(graph), "world")
    graph.trip.at = ""
    for index in range(after, after + 2):
        assert_same(call(eager, index), call(graph, index), f"call {index}")


FAILURES: dict[str, Callable[[Any, torch.Tensor], Any]] = {}


def failure(build: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    FAILURES[build.__name__] = build
    return build


@failure
def branches_on_data(self, x, y):
    loss = body(self, x, y)
    return loss if loss > 0 else -loss


@failure
def forgets_backward(self, x, y):
    return functional.cross_entropy(self.model(x), y)


@failure
def replaces_a_parameter(self, x, y):
    loss = body(self, x, y)
    self.model.head.weight = nn.Parameter(torch.ones(3, 6))
    return loss


@failure
def seeds(self, x, y):
    torch.manual_seed(3)
    return body(self, x, y)


@failure
def does_not_fit(self, x, y):
    loss = body(self, x, y)
    return loss + torch.ones(3) @ torch.ones(4)


@failure
def leaves_modes_on(self, x, y):
    torch.autocast("cpu", torch.bfloat16).__enter__()
    torch.inference_mode().__enter__()
    raise Own


@failure
def counts(self, x, y):
    self.counter += 1
    body(self, x, y)
    raise Own


@pytest.mark.parametrize("name", FAILURES)
def test_a_build_that_cannot_be_captured_changes_nothing(name):
    graph = make_side(True)
    call(graph, 0)
    other = type("Other", (mg.Graph,), {"build": FAILURES[name]})()
    other.model, other.trip, other.counter = graph.model, graph.trip, 0
    other.add_optimizer(graph.optimizer, lr_sch=graph.scheduler)
    first, graph.step = graph.step, other
    torch.manual_seed(7)
    before = world(graph)
    autocast = torch.is_autocast_enabled("cpu")
    try:
        with pytest.raises((mg.MonographError, Own)):
            other(*batch(1))
        assert_same(before, world(graph), "world")
        assert other.counter == 0
    finally:
        torch.set_autocast_enabled("cpu", autocast)
    graph.step = first
    eager = make_side(False)
    call(eager, 0)
    assert_same(call(eager, 1), call(graph, 1))


def test_a_trace_that_fails_inside_of_autograd_leaves_autograd_usable():
    graph = make_side(True)

    def fail(_gradient: torch.Tensor) -> None:
        raise Own("in a hook")

    handle = graph.model.fc.weight.register_hook(fail)
    before = world(graph)
    with pytest.raises(Own, match="in a hook"):
        graph.step(*batch(0))
    assert_same(before, world(graph), "world")
    handle.remove()
    eager = make_side(False)
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))


def test_compile_changes_nothing_that_a_step_would():
    graph, eager = make_side(True), make_side(False)
    torch.manual_seed(7)
    before = world(graph)
    graph.step.compile(*batch(0))
    after = world(graph)
    assert len(graph.step.builds) == 1
    for key in ("gradients", "values", "random", "modes", "patches", "parameters", "numbers", "scheduler"):
        assert_same(before[key], after[key], key)
    assert graph.model.note == "before" or graph.model.note == "after"
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))


@pytest.mark.parametrize("stage", ["run_passes", "make_plan", "Executor"])
@pytest.mark.parametrize("error", [Own, KeyboardInterrupt])
def test_a_compilation_that_fails_after_the_capture_changes_nothing(stage, error, monkeypatch):
    graph, eager = make_side(True), make_side(False)

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error("trip")

    torch.manual_seed(7)
    before = world(graph)
    with monkeypatch.context() as patched:
        patched.setattr(compiler, stage, fail)
        with pytest.raises(error):
            graph.step(*batch(0))
    assert_same(before, world(graph), "world")
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))


def test_an_interrupt_while_things_are_put_back(monkeypatch):
    graph = make_side(True)
    put_back = transaction.Snapshot.restore
    cuts = [True]

    def cut(snapshot: transaction.Snapshot) -> Any:
        if cuts:
            cuts.clear()
            snapshot.tables[0][0].update(snapshot.tables[0][1])
            raise KeyboardInterrupt
        return put_back(snapshot)

    torch.manual_seed(7)
    before = world(graph)
    with monkeypatch.context() as patched:
        patched.setattr(transaction.Snapshot, "restore", cut)
        with pytest.raises(KeyboardInterrupt):
            graph.step(*batch(0))
    assert_same(before, world(graph), "world")


# --- a step that is cut short --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [Own, KeyboardInterrupt, RuntimeError])
def test_a_step_cut_short_at_each_op_is_as_if_it_had_not_been(error):
    eager, graph = make_side(False), make_side(True)
    for index in range(2):
        assert_same(call(eager, index), call(graph, index))
    num_builds = len(graph.step.builds)
    at = 0
    while True:
        torch.manual_seed(7)
        before, steps = graph.values(), graph.step._store.steps
        try:
            with CutShort(at, error):
                graph.step(*batch(2))
            break
        except error:
            pass
        assert_same(before, graph.values(), f"op {at}")
        assert graph.step._store.steps == steps
        assert torch.is_grad_enabled()
        at += 1
    assert at > 60, "the program is larger than that"
    assert len(graph.step.builds) == num_builds
    torch.manual_seed(7)
    eager.step(*batch(2))
    for index in (3, 4):
        assert_same(call(eager, index), call(graph, index))


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
        return {**graph.values(), "steps": graph.step._store.steps, "scheduler": graph.scheduler.state_dict()}

    saved = {
        "model": {k: v.clone() for k, v in graph.model.state_dict().items()},
        "scale": graph.model.scale.clone(),
        "optimizer": [{k: v.clone() for k, v in e.items()} for e in graph.optimizer.state.values()],
        "scheduler": graph.scheduler.state_dict(),
        "lr": graph.optimizer.param_groups[0]["lr"],
        "last": graph.model.last,
        "steps": graph.step._store.steps,
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
        graph.step._store.steps = saved["steps"]
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
        assert graph.step._store.lock.acquire(blocking=False)
        graph.step._store.lock.release()
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
    step.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
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
