"""The ordered pipeline of passes. A pass is a function `Program -> Program`; `run.py` does the chores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from monograph.config import PASSES, Settings
from monograph.passes.add_to_output import add_to_output
from monograph.passes.canonicalise import canonicalise
from monograph.passes.cast_scale import cast_scale
from monograph.passes.cse import cse
from monograph.passes.dce import dce
from monograph.passes.fold_constants import fold_constants
from monograph.passes.gate_nonfinite import gate_nonfinite
from monograph.passes.model_update import model_update
from monograph.passes.run import AddedPass, OnWhole, Pass, Stage, pass_name, run_passes
from monograph.passes.schedule_updates import schedule_updates

__all__ = ["PASSES", "AddedPass", "Pass", "Stage", "pass_name", "pipeline", "run_passes"]


class _Row(NamedTuple):
    """A pass, and whether settings ask for it."""

    run: Pass
    is_on: Callable[[Settings], bool] = lambda _: True


# The first ones keep every bit and always run. Those with a switch change rounding: they are part of what a compiled
# backend does, and off on `aten` unless asked for. `model_update` waits to be asked everywhere: compilers merge single
# ops themselves, and in lists all updates wait for the last gradient. The last one changes the order of ops, and no
# numbers; on `aten`, where all new state lives until the step has ended, it would raise the peak of memory.
_ORDER: tuple[_Row, ...] = (
    _Row(canonicalise),
    _Row(fold_constants),
    _Row(cse),
    _Row(dce),
    _Row(cast_scale, lambda settings: settings.is_on(settings.fuse_cast_scale)),
    _Row(add_to_output, lambda settings: settings.is_on(settings.fuse_add_to_output)),
    _Row(model_update, lambda settings: bool(settings.fuse_model_update_ops)),
    _Row(OnWhole(gate_nonfinite), lambda settings: settings.detect_nonfinite),
    _Row(schedule_updates, lambda settings: settings.backend != "aten"),
)
assert tuple(pass_name(row.run) for row in _ORDER) == PASSES, "config.PASSES names the passes in their order"


def pipeline(settings: Settings) -> tuple[Pass, ...]:
    """The passes for these settings, in order; a pass of the user's stands behind the one that it names, or last."""
    rows = list(_ORDER)
    for function, after in settings.added_passes:
        names = [pass_name(row.run) for row in rows]
        place = len(rows) if after is None else names.index(after) + 1
        rows.insert(place, _Row(AddedPass(function)))
    return tuple(row.run for row in rows if row.is_on(settings))
