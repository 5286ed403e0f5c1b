"""What a step asks of modes that nothing shows: another answer is another build."""

from __future__ import annotations

import abc
import decimal
import functools
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monograph as mg

X = torch.linspace(-1.0, 1.0, 6)


class Shape(abc.ABC):  # noqa: B024 -- nothing has to be written for it
    """Other classes are registered for it."""


class Round:
    """One of them."""


class Square:
    """Another one."""


@functools.singledispatch
def size_of(item: object) -> float:
    return 1.0


def threads(x: torch.Tensor) -> torch.Tensor:
    return x * torch.get_num_threads()


def seed(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.initial_seed() % 97)


def anomaly(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if torch.is_anomaly_enabled() else 3)


def warnings_of_torch(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if torch.is_warn_always_enabled() else 3)


def product_under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return torch.outer(x, x) @ torch.outer(x, x)


def type_under_autocast(x: torch.Tensor) -> torch.Tensor:
    return x * torch.get_autocast_dtype("cpu").itemsize * (torch.get_autocast_dtype("cpu") is torch.bfloat16)


def precision(x: torch.Tensor) -> torch.Tensor:
    return x * float(decimal.Decimal(1) / decimal.Decimal(3))


def context(x: torch.Tensor) -> torch.Tensor:
    return x * decimal.getcontext().prec


def collector(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if gc.isenabled() else 3)


def errors_of_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * len(np.geterr()["over"])


def recursion(x: torch.Tensor) -> torch.Tensor:
    return x * sys.getrecursionlimit()


def subclass(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if isinstance(ROUND, Shape) else 3)


def dispatched(x: torch.Tensor) -> torch.Tensor:
    return x * size_of(SQUARE)


ROUND, SQUARE = Round(), Square()
LIMIT, THREADS = sys.getrecursionlimit(), torch.get_num_threads()
Change = Callable[[], Any]
CASES: dict[Callable[..., Any], tuple[Change, Change]] = {
    threads: (lambda: torch.set_num_threads(THREADS + 1), lambda: torch.set_num_threads(THREADS)),
    seed: (lambda: torch.manual_seed(77), lambda: None),
    warnings_of_torch: (lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False)),
    product_under_autocast: (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    type_under_autocast: (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    precision: (lambda: decimal.setcontext(decimal.Context(prec=5)), lambda: decimal.setcontext(decimal.DefaultContext)),
    context: (lambda: decimal.setcontext(decimal.Context(prec=5)), lambda: decimal.setcontext(decimal.DefaultContext)),
    collector: (gc.disable, gc.enable),
    errors_of_numpy: (lambda: np.seterr(all="raise"), lambda: np.seterr(all="warn")),
    recursion: (lambda: sys.setrecursionlimit(LIMIT + 9), lambda: sys.setrecursionlimit(LIMIT)),
    subclass: (lambda: Shape.register(Round), lambda: None),
    dispatched: (lambda: size_of.register(Square, lambda item: 5.0), lambda: None),
}  # fmt: skip


@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_another_answer_is_another_build(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    change, restore = CASES[step]
    graph = mg.trace(step)
    try:
        for _ in range(2):
            assert torch.equal(graph(X), step(X))
        assert len(graph.builds) == 1
        before = step(X)
        change()
        assert not torch.equal(before, step(X)), "the case changes nothing"
        for _ in range(2):
            assert torch.equal(graph(X), step(X))
        assert len(graph.builds) == 2
    finally:
        restore()


def test_a_function_that_an_object_holds_is_asked_again() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.ask = torch.initial_seed

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.ask() % 97)

    graph = Step()
    for seed_of_step in (3, 3, 5):
        torch.manual_seed(seed_of_step)
        assert torch.equal(graph(X), X * seed_of_step)
    assert len(graph.builds) == 2


def test_the_answer_before_a_capture_counts() -> None:
    """A capture looks for no anomalies."""
    with torch.autograd.set_detect_anomaly(True), pytest.raises(mg.CaptureError, match="is_anomaly_enabled"):
        mg.trace(anomaly)(X)
    graph = mg.trace(anomaly)
    assert torch.equal(graph(X), anomaly(X))


def test_a_reason_names_what_was_asked() -> None:
    graph = mg.trace(context)
    graph(X)
    decimal.setcontext(decimal.Context(prec=5))
    try:
        graph(X)
    finally:
        decimal.setcontext(decimal.DefaultContext)
    assert "the context of decimal" in graph.builds[1].reason


class Asked(metaclass=abc.ABCMeta):  # noqa: B024  # nothing is abstract: it is only asked about
    """An abstract class that a step asks about."""


class Unrelated(metaclass=abc.ABCMeta):  # noqa: B024  # nothing is abstract: it is only asked about
    """Another one, as imports bring many."""


def test_only_registrations_for_classes_that_a_step_knows_count() -> None:
    class Step(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2.0 if isinstance(self.item, Asked) else 3.0)

    class Item:
        """Registered later."""

    step = Step()
    step.item = Item()
    x = torch.ones(2)
    assert torch.equal(step(x), x * 3)
    Unrelated.register(type("Other", (), {}))
    assert torch.equal(step(x), x * 3)
    assert len(step.builds) == 1
    Asked.register(Item)
    assert torch.equal(step(x), x * 2)
    assert len(step.builds) == 2


def test_what_an_import_registers_of_its_own_classes_is_no_new_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that a background thread imports does so, for `Mapping`."""

    class Step(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2.0 if isinstance(self.item, Asked) else 3.0)

    class Item:
        """Registered later."""

    step, name = Step(), Asked.__module__
    step.item = Item()
    assert torch.equal(step(X), X * 3)
    (tmp_path / "registers_own.py").write_text(
        f"import {name} as asked\nclass Own: pass\nasked.Asked.register(Own)\n"
    )
    (tmp_path / "registers_others.py").write_text(
        "import sys\ndef now(cls, other):\n    class Between(cls): pass\n    Between.register(other)\n    return Between\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("registers_own")
    assert torch.equal(step(X), X * 3)
    assert len(step.builds) == 1
    step.item = own.Own()
    assert torch.equal(step(X), X * 2)
    step.item = Item()
    assert torch.equal(step(X), X * 3)
    kept = importlib.import_module("registers_others").now(Asked, Item)
    assert issubclass(kept, Asked)
    assert torch.equal(step(X), X * 2)


def mode_of_inference(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if torch.is_inference_mode_enabled() else 3)


def tensor_of_inference(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    return made * (2 if made.is_inference() else 3)


@pytest.mark.parametrize("body", [mode_of_inference, tensor_of_inference])
def test_a_step_that_asks_for_inference_mode_is_refused_under_it(
    body: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    graph = mg.trace(body)
    for _ in range(2):
        assert torch.equal(graph(X), body(X))
        with (
            torch.inference_mode(),
            pytest.raises(mg.CaptureError, match="is_inference_mode_enabled") as caught,
        ):
            graph(X)
        assert "before the step" in caught.value.hint
    with torch.inference_mode(), pytest.raises(mg.CaptureError, match="is_inference_mode_enabled"):
        mg.trace(body)(X)
    assert len(graph.builds) == 1


def test_a_step_that_asks_for_inference_mode_and_enters_it_itself() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            made = mode_of_inference(x)
        return made * 2

    graph = mg.trace(body)
    for _ in range(2):
        assert torch.equal(graph(X), body(X))


def test_a_step_that_does_not_ask_runs_in_inference_mode() -> None:
    layer = torch.nn.Linear(6, 3)
    graph = mg.trace(lambda x: layer(x))
    for around in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with around():
            assert torch.equal(graph(X), layer(X))
    assert len(graph.builds) == 1
