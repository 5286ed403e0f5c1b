"""StateStore: the live tensors of a Graph by path, shared by all its builds."""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class StateStore:
    """Path → live tensor, and the number of steps done. The only thing that changes.

    Plain torch code may hold and change the same tensors between steps. `lock` is held by one call at a time.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0
    torn: str = ""  # why the state is part old and part new; empty for a whole one
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def forget(self, gone: Container[int]) -> None:
        """Let go of tensors, by their ids."""
        self.tensors = {path: tensor for path, tensor in self.tensors.items() if id(tensor) not in gone}
