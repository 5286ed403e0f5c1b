"""The last step of a loop that is not ours, to be looked at once more: also one that several batches make."""

from __future__ import annotations

from typing import Any

import monograph as mg
from monograph.numerics.verify import VerifyReport, verify_after


class LastStep:
    """The calls of a graph that made the last step of the optimizer; with gradient accumulation there are several."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self._is_complete = True

    def add(self, *args: Any, optimizer_steps: bool) -> None:
        """One more call; with `optimizer_steps` it ends the step. Dicts among the arguments may be changed by it."""
        if self._is_complete:
            self._calls.clear()
        self._calls.append(tuple(map(_kept, args)))
        self._is_complete = optimizer_steps

    def __bool__(self) -> bool:
        return bool(self._calls)

    def verify(self, graph: mg.Graph, **options: Any) -> VerifyReport:
        """The last call by `graph.verify()`, after those before it, which leave their gradients. Then all is as it was."""
        *before, last = [tuple(map(_kept, call)) for call in self._calls]
        if not before or not self._is_complete:
            return graph.verify(*last, **options)
        return verify_after(graph, before, last, **options)


def _kept(item: Any) -> Any:
    """An argument as it is now: a loss may take its labels out of a batch."""
    return dict(item) if type(item) is dict else item
