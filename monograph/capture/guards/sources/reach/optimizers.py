"""Attributes of optimizers, without what is guarded apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monograph.capture.guards.sources.places import Entries
from monograph.compat.optimizers import NOTES_IN_OPTIMIZERS, without_scheduler

# guarded apart: tensors, and numbers that may move; and what schedulers and scalers note for themselves
GUARDED_APART = NOTES_IN_OPTIMIZERS | {"state", "param_groups"}


@dataclass(eq=False)
class OptimizerEntries(Entries):
    """Attributes of an optimizer. The wrapper that a scheduler puts around `step` changes nothing in a step."""

    kind: type

    def now(self) -> Mapping[Any, Any]:
        found = dict(super().now())
        if "step" in found:
            step = without_scheduler(found.pop("step"), self.kind)
            found |= {} if step is None else {"step": step}
        return found
