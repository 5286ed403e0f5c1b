"""Runner: what a backend makes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from monograph.compat.amp import without_autocast
from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.ir.program import Program
from monograph.layout import extent


class Repeated(Protocol):
    """Runs of a program one after another, as many as its arguments are stacked for, or the first of them."""

    @property
    def made(self) -> int:
        """How many have been made."""

    @property
    def has_failed(self) -> bool:
        """True if the run after those has failed."""

    def run(self) -> None:
        """Make runs until some milliseconds have gone, all are made, or one fails. No interrupt divides it."""

    def results(self) -> Sequence[torch.Tensor]:
        """What `finish` gets, each stacked for all runs that were made, on memory of its own."""


@dataclass(frozen=True)
class Runner:
    """Runs a program: `run(prepared)` on what `prepare(inputs)` gives; `finish(results, prepared)` makes the outputs.

    `written` are the positions of outputs that `run` writes into the state itself; `finish` gives None for them. Then
    `run` is one call of C, which no interrupt divides: it has happened or it has not. Or it writes nothing, and `update`,
    which gets its results and gives others, does: signals wait while that runs. If either fails, `has_begun` says whether it
    had begun to write; without that it may have. `failure` finds the error that the same inputs give op by op, with the
    user's line.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    prepare: Callable[[list[Any]], list[Any]] | None = None
    finish: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None
    written: frozenset[int] = frozenset()
    has_begun: Callable[[], bool] | None = None
    failure: Callable[[Sequence[Any]], Exception | None] | None = None
    update: Callable[[Any], Sequence[Any]] | None = None
    repeat: Callable[[Sequence[Any], Mapping[int, torch.Tensor]], Repeated | None] | None = None


def is_promised(tensor: torch.Tensor) -> bool:
    """True if a tensor is a conjugation or negation by a bit alone: its memory holds other numbers."""
    return tensor.is_conj() or tensor.is_neg()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory of their own, with the same strides."""
    if tensor.numel() == 0:
        return tensor
    span = extent(tensor.shape, tensor.stride())
    with hidden_from_dispatch_modes():
        memory = tensor.detach().as_strided((span,), (1,)).resolve_conj().resolve_neg()
        return memory.as_strided(tensor.shape, tensor.stride(), 0)


def resolving(runner: Runner, positions: Collection[int]) -> Runner:
    """A runner that gets the inputs at `positions` in memory that holds their numbers. Views alias the memory given."""
    if not positions:
        return runner

    def prepare(inputs: list[Any]) -> list[Any]:
        resolved = inputs.copy()
        for position in positions:
            if isinstance(inputs[position], torch.Tensor) and is_promised(inputs[position]):
                resolved[position] = _resolved(inputs[position])
        return resolved if runner.prepare is None else runner.prepare(resolved)

    return replace(runner, prepare=prepare, repeat=None)


def rehearse(runner: Runner, program: Program, inputs: list[Any]) -> list[Any]:
    """The outputs of `program`, which the runner runs, for inputs in memory of their own, which it may change.

    The caller keeps the random state.
    """
    by_path = {port.path: item for port, item in zip(program.inputs, inputs, strict=True)}
    with torch.no_grad(), without_autocast():
        prepared = inputs if runner.prepare is None else runner.prepare(inputs)
        results = runner.run(prepared)
        if runner.update is not None:
            results = runner.update(results)
        outputs = list(results if runner.finish is None else runner.finish(results, inputs))
    for position in runner.written:  # the new state is where the old one was
        outputs[position] = by_path[program.outputs[position].path]
    return outputs
