"""A value that backward() needs and that was changed in place: who changed it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from monograph.compat.ops import writes_to_inputs
from monograph.errors import CaptureError
from monograph.ir.meta import describe, origin
from monograph.ir.printer import call_text
from monograph.user_code.lines import user_place

_TOLD = re.compile(r"modified by an inplace operation: \[\S+ (\[[^\]]*\])\], which is output \d+ of (\w+)")


@contextmanager
def in_place_changes_explained(graph: fx.Graph) -> Iterator[None]:
    """To be entered around backward(). Raises CaptureError with the ops of `graph` that may have changed the value."""
    try:
        yield
    except RuntimeError as error:
        if (match := _TOLD.search(str(error))) is None:
            raise
        shape, maker = match.groups()
        suspects = [node for node in graph.nodes if _changes(node, shape)]
        listed = "; ".join(f"{call_text(node)} at {origin(node)}" for node in suspects)
        raise CaptureError(
            f"backward() needs what {maker.removesuffix('Backward0')} made, a tensor of shape {shape}, and it was "
            f"changed in place: by {listed or 'an op outside of the step'}",
            where=origin(suspects[0]) if len(suspects) == 1 and origin(suspects[0]).file else user_place(),
            hint="change a copy, or write it out of place: h = h * s instead of h *= s",
        ) from error


def _changes(node: fx.Node, shape: str) -> bool:
    if node.op != "call_function" or not writes_to_inputs(node.target):
        return False
    described = describe(node.meta.get("val"))
    return origin(node).phase == "forward" and str(list(getattr(described, "shape", ()))) == shape
