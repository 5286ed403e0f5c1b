"""All or nothing: a capture that fails leaves everything as it was before, and can be tried again."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import monograph as mg
from monograph import compiler
from monograph.state import snapshot as transaction
from tests.runtime.trip import (
    Own,
    Side,
    Trip,
    _captured_once,  # noqa: F401
    batch,
    body,
    call,
    make_side,
)
from tests.support import assert_same


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


@pytest.mark.one_case
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


@pytest.mark.one_case
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


def test_a_block_of_autocast_that_nobody_leaves_ends_with_the_capture():
    class Entered(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            torch.autocast("cpu", torch.float16).__enter__()
            raise Own("in the block")

    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with pytest.raises(Own, match="in the block"):
        Entered()(torch.ones(2))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


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


@pytest.mark.one_case
@pytest.mark.parametrize("stage", ["run_passes", "make_plan", "make_runnable"])
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
            signal.raise_signal(signal.SIGINT)
        return put_back(snapshot)

    torch.manual_seed(7)
    before = world(graph)
    with monkeypatch.context() as patched:
        patched.setattr(transaction.Snapshot, "restore", cut)
        with pytest.raises(KeyboardInterrupt):
            graph.step(*batch(0))
    assert_same(before, world(graph), "world")
