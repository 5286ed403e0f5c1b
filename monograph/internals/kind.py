"""What a class of graphs says of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from monograph.block import Block


@dataclass(frozen=True)
class Kind:
    """How it shows modules, and the name that its last argument may have."""

    block: type[Block] = Block
    last: str | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the graphs, for their names

    def of_subclass(self, block: type[Block] | None, last: str | None) -> Kind:
        """What a class below says; None for what it says nothing of."""
        return Kind(block or self.block, last or self.last)
