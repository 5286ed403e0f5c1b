"""Many runs of a program in one loop, where a run needs nothing of Python but to be counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from monograph.compat.global_state import set_grad_enabled
from monograph.ir.call.tree import LEAF, unflatten
from monograph.ir.graph_signature import BoundProgram
from monograph.runtime.failures import raise_in_place_of
from monograph.runtime.runner import Repeated, Runner
from monograph.state.signals import held_back


def repetition(
    runner: Runner,
    bound: BoundProgram,
    inputs: list[Any],
    stacks: Mapping[int, torch.Tensor],
    numbers: Mapping[int, Sequence[Any]],
    fence: Callable[[torch.Tensor], Any],
) -> Repetition | None:
    """Runs of a bound program with these inputs, but for the parts of `stacks`, and for `numbers` of each run.

    None where there is no loop for that. A result that required grad in build() goes through `fence`.
    """
    if runner.repeat is None or not stacks or not all(map(_is_made_anew, bound.results)):
        return None
    prepared = inputs if runner.prepare is None else runner.prepare(inputs)
    if not all(isinstance(prepared[position], torch.Tensor) for position in numbers):
        return None
    of_numbers = {
        position: torch.tensor(values, dtype=prepared[position].dtype, device=prepared[position].device)
        for position, values in numbers.items()
    }
    runs = runner.repeat(prepared, {**stacks, **of_numbers})
    return None if runs is None else Repetition(runner, bound, prepared, runs, fence)


def _is_made_anew(result: Any) -> bool:
    """True for a result that no later run changes, and for a value of Python's that flattening leaves whole."""
    if result.kind == "output":
        return result.live is None
    return result.kind == "fixed" and isinstance(result.value, (bool, float, int, str, type(None)))


class Repetition:
    """Runs that are made one after another, and what they give."""

    def __init__(
        self,
        runner: Runner,
        bound: BoundProgram,
        inputs: Sequence[Any],
        runs: Repeated,
        fence: Callable[[torch.Tensor], Any],
    ) -> None:
        self._fence = fence
        self._runner, self._bound, self._inputs, self._runs = runner, bound, inputs, runs

    @property
    def made(self) -> int:
        """How many runs have been made."""
        return self._runs.made

    @property
    def has_failed(self) -> bool:
        """True if the run after those has failed, and has changed nothing."""
        return self._runs.has_failed

    def run(self, count: Callable[[int], object]) -> None:
        """Make runs until some milliseconds have gone, all are made, or one fails, and `count` them.

        An interrupt is met when that is done. Raises TornStateError if a run fails that has begun to change state.
        """
        before, grad_mode = self._runs.made, torch.is_grad_enabled()
        with held_back():
            set_grad_enabled(False)
            try:
                self._runs.run()
            finally:
                set_grad_enabled(grad_mode)
            if self._runs.made > before:
                count(self._runs.made - before)
            if self._runs.has_failed and self._runner.has_begun is not None and self._runner.has_begun():
                raise_in_place_of(RuntimeError("a kernel failed"), self._runner, self._inputs, partial(int))

    def results(self) -> tuple[Any, list[Any]]:
        """What the last run gave, as a call returns it, and for each leaf of that what all gave: tensors are stacked."""
        given = self._runs.results()
        outputs = given if self._runner.finish is None else self._runner.finish(given, self._inputs)
        leaves = [
            (self._fence(outputs[result.index]) if result.requires_grad else outputs[result.index])
            if result.kind == "output"
            else result.value
            for result in self._bound.results
        ]
        last = [leaf[-1] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tree = self._bound.result_tree
        return last[0] if tree == LEAF else unflatten(tree, iter(last)), leaves
