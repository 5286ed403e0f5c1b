"""What a step asks of tensors, arrays, modules and contexts that it does not compute with is a guarded fact."""

from __future__ import annotations

import contextvars
import decimal
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg

X = torch.tensor([1.25, -3.0])
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE")
Case = tuple[Any, Callable[[Any], Any], Callable[[Any], object]]


def in_context(value: int) -> contextvars.Context:
    context = contextvars.Context()
    context.run(VARIABLE.set, value)
    return context


def no_gradient(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones(2, 2)


# what is held, the number that a step makes of it, and what changes it
CASES: dict[str, Callable[[], Case]] = {
    "the length of a tensor": lambda: (torch.ones(2), len, lambda t: setattr(t, "data", torch.ones(7))),
    "the shape of a tensor": lambda: (torch.ones(2), lambda t: t.shape[0], lambda t: t.resize_(9)),
    "strides of a tensor": lambda: (torch.ones(2, 3), lambda t: t.stride()[0], lambda t: t.t_()),
    "the type of a tensor": lambda: (
        torch.ones(2),
        lambda t: 2 if t.dtype is torch.float32 else 3,
        lambda t: setattr(t, "data", t.double()),
    ),
    "a tensor in a list": lambda: (
        [torch.ones(2)],
        lambda held: len(held[0]),
        lambda held: setattr(held[0], "data", torch.ones(7)),
    ),
    "a frozen weight": lambda: (
        nn.Linear(2, 2),
        lambda layer: 2 if layer.weight.requires_grad else 3,
        lambda layer: layer.weight.requires_grad_(False),
    ),
    "whether there is a gradient": lambda: (
        nn.Linear(2, 2),
        lambda layer: 2 if layer.weight.grad is None else 3,
        no_gradient,
    ),
    "the first attribute of a tensor": lambda: (
        torch.ones(2),
        lambda t: getattr(t, "k", 1),
        lambda t: setattr(t, "k", 4),
    ),
    "the shape of an array of objects": lambda: (
        np.zeros((1, 4), object),
        len,
        lambda a: setattr(a, "shape", (4, 1)),
    ),
    "whether an array is empty": lambda: (np.zeros((0, 3)), len, lambda a: setattr(a, "shape", (3, 0))),
    "whether an array may be written": lambda: (
        np.ones(2),
        lambda a: 2 if a.flags.writeable else 3,
        lambda a: a.setflags(write=False),
    ),
    "a variable of a context": lambda: (
        in_context(2),
        lambda c: c.run(VARIABLE.get),
        lambda c: c.run(VARIABLE.set, 6),
    ),
    "an entry of a context": lambda: (
        in_context(2),
        lambda c: c.get(VARIABLE, 7),
        lambda c: c.run(VARIABLE.set, 6),
    ),
    "flags of a decimal context": lambda: (
        decimal.Context(),
        lambda c: 2 if c.flags[decimal.Inexact] else 3,
        lambda c: c.divide(1, 3),
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_another_answer_is_another_build(name: str) -> None:
    held, number, change = CASES[name]()

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.kept = SimpleNamespace(held=held)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * number(self.kept.held)

    step = Step()
    before = number(held)
    for _ in range(2):
        assert torch.equal(step(X), X * before)
    change(held)
    assert number(held) != before
    for _ in range(2):
        assert torch.equal(step(X), X * number(held))
    assert len(step.builds) == 2


@pytest.mark.parametrize("by", [importlib.import_module, __import__], ids=["import_module", "__import__"])
def test_modules_that_are_imported_by_name(
    by: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"scales_of_{by.__name__}"
    (tmp_path / f"{name}.py").write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    build = eval(f"lambda self, x: x * {by.__name__}({name!r}).SCALE", {by.__name__: by})
    step = type("Step", (mg.Graph,), {"build": build})()
    importlib.import_module(name)
    for scale in (1.0, 3.0, 1.0):
        sys.modules[name].SCALE = scale  # type: ignore[attr-defined]
        for _ in range(2):
            assert torch.equal(step(X), X * scale)
