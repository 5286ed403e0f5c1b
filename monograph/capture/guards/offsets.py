"""Where arguments are in memory, relative to each other and to state: what a build knows of it, checked at each call.

Where they begin in their storage counts for steps that look at it by absolute positions alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import fx

from monograph.capture.tensors.functional.overlaps import Apart, Overlaps
from monograph.ir.call.signature import Call

_OFFSET: Final = 3  # the position of storage_offset, which is None for "where the tensor begins"
_ABSOLUTE: Final = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


class Offsets:
    """The offsets of the arguments at capture, if the step depends on them, and what must not overlap."""

    def __init__(self, nodes: Iterable[fx.Node], call: Call, overlaps: Overlaps, *, read: bool) -> None:
        """`read`: build() asked where some tensor begins."""
        self._known = _offsets(call) if read or any(map(_is_absolute, nodes)) else ()
        self.overlaps = overlaps

    @property
    def apart(self) -> Apart | None:
        """What `hold` looks at, if that is only what shares memory with what is written; None if there is more."""
        return None if self._known else self.overlaps.apart

    def hold(self, call: Call) -> bool:
        """True if a step with these arguments looks at the same places, and writes nothing that it reads elsewhere."""
        return (not self._known or _offsets(call) == self._known) and self.overlaps.hold(call)

    def reason(self, call: Call) -> str | None:
        """The first argument that begins at another place, or overlaps what is written, as a sentence."""
        if (found := self.overlaps.reason(call)) is not None:
            return found
        for path, before, now in zip(call.paths(), self._known, _offsets(call), strict=False):
            if before != now:
                return f"argument {path} begins at element {now} of its memory, not at {before}: build() looks at that"
        return None


def _is_absolute(node: fx.Node) -> bool:
    if node.target not in _ABSOLUTE:
        return False
    position = _OFFSET + (node.target is _ABSOLUTE[2])  # the source of a scatter comes second
    given = node.args[position] if len(node.args) > position else node.kwargs.get("storage_offset")
    return given is not None


def _offsets(call: Call) -> tuple[int, ...]:
    return tuple(map(_offset, call.leaves))


def _offset(leaf: Any) -> int:
    return int(leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else 0
