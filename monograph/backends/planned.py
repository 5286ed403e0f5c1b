"""What is on the device `meta` is planned, and never run: nothing is lowered for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monograph.backends.lowering import LoweredProgram
from monograph.errors import BackendError
from monograph.ir.meta import metas, value
from monograph.ir.program import Program
from monograph.runtime.runner import Runner
from monograph.settings import PLAIN

META = "meta"  # the device of tensors without memory


def has_no_data(program: Program) -> bool:
    """True if an input is a tensor without memory."""
    inputs = program.graph.find_nodes(op="placeholder")
    return any(meta.device.type == META for node in inputs for meta in metas(value(node)))


def planned_only() -> LoweredProgram:
    """What refuses to run."""
    return LoweredProgram(PLAIN, Runner(_refused), notes=(f"not to be run: on the device {META}",))


def _refused(inputs: list[Any]) -> Sequence[Any]:
    raise BackendError(
        f"a step on the device {META} cannot run: its tensors have no memory",
        hint="graph.memory(...) says what it will hold; to run it, make model and optimizer on a device with memory",
    )
