"""The ordered pipeline of passes. A pass is a function `Program -> Program`; `run.py` does the chores."""

from __future__ import annotations

from monograph.config import Settings
from monograph.passes.dce import dce
from monograph.passes.run import Pass, Stage, run_passes

__all__ = ["Pass", "Stage", "pipeline", "run_passes"]


def pipeline(settings: Settings) -> tuple[Pass, ...]:
    """The passes for these settings, in order. All of them keep every bit."""
    return (dce,)
