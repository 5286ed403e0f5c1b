"""A step on the device `meta` is planned, and never run: nothing is lowered for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from monograph.backends.lowering import LoweredProgram
from monograph.errors import BackendError
from monograph.runtime.runner import Runner
from monograph.settings import PLAIN

PLANNED_ONLY: Final = f"planned as on {PLAIN} and the CPU, and not to be run: tensors on meta have no memory"


def planned_only() -> LoweredProgram:
    """What refuses to run."""
    return LoweredProgram(PLAIN, Runner(_refused), notes=(PLANNED_ONLY,))


def _refused(inputs: list[Any]) -> Sequence[Any]:
    raise BackendError(
        "a step on the device meta cannot run: its tensors have no memory",
        hint="graph.memory(...) says what it will hold; to run it, make model and optimizer on a device with memory",
    )
