"""An op of a step and the bytes that are held there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monograph.user_code.lines import Origin


@dataclass(frozen=True)
class Point:
    """An op of the step: the bytes that are held while it runs, and those that are left when its dead values are freed."""

    op: str
    where: Origin
    running_bytes: int
    left_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "op": self.op,
            "phase": self.where.phase,
            "module": self.where.module,
            "file": self.where.file,
            "line": self.where.line,
            "running_bytes": self.running_bytes,
            "left_bytes": self.left_bytes,
        }
