"""The loop over the steps of a recurrent layer of float32, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from monograph.layout import Layout
from monograph.native.code import Code

_FEWEST_FOR_THREADS = 1 << 18  # multiplications of a step; fewer take one thread as long as waking another
_COLUMNS = 16  # that one thread takes at least
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}  # by kind
_FORWARD = {
    "lstm": ("given", "weight", "first", "other"),
    "gru": ("given", "weight", "first", "other"),
    "tanh": ("given", "weight", "first"),
    "relu": ("given", "weight", "first"),
}
_BACKWARD = {
    "lstm": ("grad", "last", "last_cells", "weight", "first", "block"),
    "gru": ("grad", "last", "weight", "first", "block"),
    "tanh": ("grad", "last", "weight", "block"),
    "relu": ("grad", "last", "weight", "block"),
}
_GIVEN = {"forward": "given weight first other", "backward": "grad last last_cells weight first block"}


@dataclass(frozen=True)
class Recurrence:
    """The states of all steps with what the backward needs, or gradients, in one block.

    Given are what the inputs of all steps give to the gates, the weight by which states do, and the first state; then the first
    cells of an LSTM, or the biases of what states give in a GRU.
    """

    gives: Literal["forward", "backward"]
    given: tuple[Layout, ...]
    kind: str
    reverse: bool
    threads: int = 1

    @classmethod
    def of(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Recurrence:
        """The loop; options are the kind of the layer and whether it begins at the end."""
        kind, reverse = options
        return cls("forward", tuple(operands), kind, reverse, threads)

    @classmethod
    def of_gradient(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Recurrence:
        """Its gradients, from those of all states, of the last one and the last cells, what it was given and what it gave."""
        kind, reverse = options
        return cls("backward", tuple(operands), kind, reverse, threads)

    @property
    def _roles(self) -> tuple[str, ...]:
        return (_FORWARD if self.gives == "forward" else _BACKWARD)[self.kind]

    @property
    def _named(self) -> dict[str, Layout]:
        return dict(zip(self._roles, self.given, strict=True))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Steps, rows of the batch, units."""
        steps, rows, _ = self._named["given" if self.gives == "forward" else "grad"].shape
        return steps, rows, self._named["weight"].shape[1]

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The tensors in the block, in their order."""
        steps, rows, units = self.sizes
        states, gates = (steps, rows, units), (steps, rows, units * GATES[self.kind])
        if self.gives == "forward":
            inner = {"lstm": {"cells": states, "gates": gates}, "gru": {"of_state": states, "gates": gates}}
            return {"states": states, **inner.get(self.kind, {})}
        made: dict[str, tuple[int, ...]] = {"of_input": gates}
        if self.kind == "gru":
            made["of_products"] = gates
        made["of_first"] = (rows, units)
        if self.kind == "lstm":
            made["of_cells"] = (rows, units)
        return made

    @property
    def results(self) -> tuple[Layout, ...]:
        """What it gives."""
        return (Layout.contiguous(sum(map(math.prod, self.parts.values()))),)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What it has to be given."""
        return tuple(Layout.contiguous(*item.shape) for item in self.given)

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: nothing is empty or beyond an int's reach."""
        return min(self.sizes) > 0 and all(item.is_in_reach for item in (*self.operands, *self.results))

    @property
    def used_threads(self) -> int:
        """How many threads share it."""
        _, rows, units = self.sizes
        if rows * units * units * GATES[self.kind] < _FEWEST_FOR_THREADS:
            return 1
        return min(self.threads, -(-units // _COLUMNS))

    @property
    def code(self) -> Code:
        """Its function."""
        numbers = [*map(str, self.sizes), str(self.reverse).lower(), str(self.used_threads)]
        name = "_".join(["monograph_recurrence", self.gives, self.kind, *numbers])
        roles = self._roles
        given = [role if role in roles else "nullptr" for role in _GIVEN[self.gives].split()]
        call = f"Recurrence<monograph::{', '.join([self.kind.upper(), *numbers])}>::{self.gives}({', '.join(given)}, made)"
        return Code(name, ("rows", "product", "recurrent"), (*roles, "made"), call)
