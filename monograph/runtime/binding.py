"""Where a program's inputs come from and where its outputs go, in tables that each call goes through."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.compat.ops import is_random
from monograph.ir.graph_signature import (
    Argument,
    BoundProgram,
    Copy,
    Fixed,
    Gradient,
    HeldGradient,
    Number,
    ReadAfter,
    Target,
)
from monograph.ir.meta import metas, value
from monograph.ir.port import Role
from monograph.runtime.runner import is_promised
from monograph.state.random import default_generators


class InputTable(NamedTuple):
    """Positions in the program's inputs, each with what is read for it at a call."""

    fixed: list[Any]  # the same at each call, None in the other places
    arguments: Sequence[tuple[int, int]]
    numbers: Sequence[tuple[int, Number]]
    gradients: Sequence[tuple[int, torch.Tensor]]  # of these parameters

    @classmethod
    def of(cls, bound: BoundProgram) -> InputTable:
        """Those of a bound program."""
        sources = list(enumerate(bound.sources))
        return cls(
            [_detached(source.value) if isinstance(source, Fixed) else None for source in bound.sources],
            [(i, source.index) for i, source in sources if isinstance(source, Argument)],
            [(i, source) for i, source in sources if isinstance(source, Number)],
            [(i, source.parameter) for i, source in sources if isinstance(source, HeldGradient)],
        )

    def given(self, bound: BoundProgram) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The fixed tensors, each with one on the memory that it had when it was found."""
        return [
            (source.value, there)
            for source, there in zip(bound.sources, self.fixed, strict=True)
            if isinstance(source, Fixed) and isinstance(there, torch.Tensor)
        ]


class Outputs(NamedTuple):
    """Positions in the program's outputs, each with what is written with it after the ops have run."""

    copied: Sequence[int]
    live: list[torch.Tensor]  # what those are copied to, all at once
    others: Sequence[tuple[int, Target]]
    read_after: Mapping[ReadAfter, int]

    @classmethod
    def of(cls, bound: BoundProgram, written: Collection[int]) -> Outputs:
        """Those of a bound program whose runner writes some itself."""
        num_results = sum(port.role is Role.USER for port in bound.program.outputs)
        targets = list(enumerate(bound.targets, num_results))
        copied = [(i, t) for i, t in targets if isinstance(t, Copy) and i not in written]
        copies = [(i, t) for i, t in copied if not is_promised(t.tensor)]
        promised = [(i, t) for i, t in copied if is_promised(t.tensor)]  # no foreach op takes these
        return cls(
            [i for i, _ in copies],
            [_detached(target.tensor) for _, target in copies],
            promised + [(i, target) for i, target in targets if not isinstance(target, Copy)],
            {t: i for i, t in targets if isinstance(t, ReadAfter)},
        )

    @property
    def add_gradients(self) -> bool:
        """True if gradients of arguments are added to those that are there."""
        return any(isinstance(target, Gradient) and target.tensor is None for _, target in self.others)


def generators_of(bound: BoundProgram) -> list[torch.Generator]:
    """The generators that a program draws from."""
    devices: set[torch.device] = set()
    for node in bound.program.ops():
        if is_random(node.target):
            devices |= {item.device for item in metas(value(node))}
    explicit = [source.value for source in bound.sources if isinstance(source, Fixed)]
    return default_generators(devices) + [item for item in explicit if isinstance(item, torch.Generator)]


def _detached(item: Any) -> Any:
    """A tensor on the same memory that autograd does not follow; anything else as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    with hidden_from_dispatch_modes():
        return item.detach()
