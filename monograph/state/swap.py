"""What has taken the place of what: tensors, and the dicts and lists of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Swap:
    """What has taken the place of what, by id of the old object, and the old objects, which stay alive with it.

    A tensor in the place of itself has other memory.
    """

    new: Mapping[int, Any]
    old: Sequence[Any]

    def of(self, item: Any) -> Any:
        """What is now in the place of an object: itself, if nothing has taken it."""
        return self.new.get(id(item), item)

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Old and new tensors that have memory: of sparse ones these are the parts."""
        for item in self.old:
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                yield item, self.new[id(item)]


NOTHING_REPLACED = Swap({}, ())
