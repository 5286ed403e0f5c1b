"""The random steps over numbers as graphs, compared with what the plain functions gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import monograph as mg
from monograph.errors import MonographError
from tests.support.float_expressions import (
    OwnOptimizer,
    Program,
    bits,
    eager_calls,
    eager_steps,
    outcome,
    stepped,
)


def _called(program: Program) -> list[Any]:
    function = program.function()

    class Called(mg.Graph):
        def build(self, x: torch.Tensor, *numbers: float) -> Any:
            return function(x, *numbers)

    graph, x = Called(), torch.tensor([0.25, -1.5, 3.0])
    return [outcome(lambda call=call: graph(x, *call)) for call in program.calls]  # type: ignore[misc]


class _Held(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.25, -1.5, 3.0]))


def _stepped(program: Program) -> list[Any]:
    held = _Held()
    optimizer = OwnOptimizer([held.weight], program.function(), program.calls[0])

    class Stepped(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held = held
            self.add_optimizer(optimizer)

        def build(self) -> None:
            (self.held.weight * self.held.weight).sum().backward()

    graph = Stepped()
    return [stepped(call, held.weight, optimizer, graph) for call in program.calls]


WAYS: dict[str, tuple[Callable[[Program], list[Any]], Callable[[Program], list[Any]]]] = {
    "arguments": (eager_calls, _called),
    "param group": (eager_steps, _stepped),
}


def differences(program: Program, way: str) -> list[str]:
    """The calls of a program whose graph gives something else than eager; and, marked, named refusals."""
    plain, captured = WAYS[way]
    found = []
    for call, expected, got in zip(program.calls, plain(program), captured(program), strict=True):
        if isinstance(expected, Exception):
            # of two errors in one step the graph may meet the other one first: kernels run when Python is done
            kinds = (MonographError, type(expected), *([Exception] if type(expected) is RuntimeError else []))
            # ops in place on a complex constant: no trace sees that eager raises, whether or not a number moves
            fine = isinstance(got, kinds) or "ComplexFloat can't be cast" in str(expected)
            told = "" if fine else f"eager raises {expected!r}, the graph gives {got!r}"
        elif isinstance(got, Exception):
            told = f"refused: {got!r}" if isinstance(got, MonographError) else f"the graph raises {got!r}"
        else:
            told = "" if bits(expected) == bits(got) else f"eager gives {expected!r}, the graph {got!r}"
        if told:
            found.append(f"{call}: {told}")
    return found
