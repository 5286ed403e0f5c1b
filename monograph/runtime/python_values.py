"""What a step puts into Python objects: plain values, and numbers that move, computed from inputs and from outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from monograph.ir.graph_signature import ReadAfter, Write

# and what went wrong in computing one
Values: TypeAlias = tuple[Sequence[tuple[Write, Any]], Exception | None]


def known_before(writes: Sequence[Write], inputs: Sequence[Any]) -> Sequence[Any]:
    """What is known before the step of each value that it writes: all of it, or what it is computed from."""
    return [_known(write, inputs) for write in writes]


def values_after(
    writes: Sequence[Write],
    known: Sequence[Any],
    outputs: Sequence[Any],
    read_after: Mapping[ReadAfter, int],
) -> Values:
    """The values, from what was known before the step and from its outputs, and a fault."""

    def read_out(item: ReadAfter) -> Any:
        return outputs[read_after[item]].item()

    found, fault = [], None
    for write, given in zip(writes, known, strict=True):
        try:
            found.append((write, write.value.after(given, read_out) if _waits(write) else given))
        except (ArithmeticError, ValueError) as error:
            error.add_note(f"in what build() computes for {write.about}")
            fault = error
    return found, fault


def _waits(write: Write) -> bool:
    """True for a value that depends on outputs of the program."""
    return write.moves and not write.value.is_known


def _known(write: Write, inputs: Sequence[Any]) -> Any:
    if not write.moves:
        return write.value
    leaves = write.value.before(inputs)
    return write.value.after(leaves, None) if write.value.is_known else leaves
