"""Observers of a compilation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import fx, nn

from monograph.ir.call_text import Leaf


class Observer:
    """Takes no notice. Another one overrides what it wants to know of; it must change nothing."""

    stack_depth = 0  # how many frames of the user's code are kept for each op
    only_user_frames = True

    def stage(self, _name: str) -> AbstractContextManager[None]:
        """A part of the work begins; it lasts until the context ends."""
        return nullcontext()

    def module_called(self, path: str, module: nn.Module, inputs: Sequence[Leaf]) -> None:
        """A held module begins its forward."""

    def module_returned(self, path: str, module: nn.Module, outputs: Sequence[Leaf]) -> None:
        """It has returned."""

    def op(self, node: fx.Node) -> None:
        """An op is recorded; what it makes is not known yet."""

    def progress(self, detail: str) -> None:
        """A stage has come so far."""


SILENT = Observer()
