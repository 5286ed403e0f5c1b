"""Runner: what a backend makes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph._torch import without_autocast
from monograph.ir.program import Program


@dataclass(frozen=True)
class Runner:
    """Runs a program: `run(prepared)` on what `prepare(inputs)` gives; `finish(results, prepared)` makes the outputs.

    `written` are the positions of outputs that `run` writes into the state itself; `finish` gives None for them. Then
    `run` is one call of C, which no interrupt divides: it has happened or it has not.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    prepare: Callable[[list[Any]], list[Any]] | None = None
    finish: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None
    written: frozenset[int] = frozenset()


def rehearse(runner: Runner, program: Program, inputs: list[Any]) -> list[Any]:
    """The outputs of `program`, which the runner runs, for inputs in memory of their own, which it may change.

    The caller keeps the random state.
    """
    by_path = {port.path: item for port, item in zip(program.inputs, inputs, strict=True)}
    with torch.no_grad(), without_autocast():
        prepared = inputs if runner.prepare is None else runner.prepare(inputs)
        results = runner.run(prepared)
        outputs = list(results if runner.finish is None else runner.finish(results, inputs))
    for position in runner.written:  # the new state is where the old one was
        outputs[position] = by_path[program.outputs[position].path]
    return outputs
