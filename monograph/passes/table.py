"""Every pass in the order in which they run: those over a step, then those of the backend that compiles it.

A pass is a function `Program -> Program`; `run.py` does the chores. A new one is a file and a row here: switches,
`verify()`, hints and the table of docs/passes.md go by the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from monograph.passes.add_to_output import add_to_output
from monograph.passes.canonicalise import canonicalise
from monograph.passes.cast_scale import cast_scale
from monograph.passes.collectives import merge_collectives
from monograph.passes.cse import cse
from monograph.passes.dce import dce
from monograph.passes.fold_constants import fold_constants
from monograph.passes.gate_nonfinite import gate_nonfinite
from monograph.passes.inductor.check_values import check_values
from monograph.passes.inductor.foreach_to_single import foreach_to_single
from monograph.passes.inductor.fused_to_single import fused_to_single
from monograph.passes.inductor.inline_parts import inline_parts
from monograph.passes.inductor.recurrent import recurrent
from monograph.passes.inductor.scalars_to_tensors import scalars_to_tensors
from monograph.passes.inductor.small_types import small_types
from monograph.passes.inductor.stack_numbers import stack_numbers
from monograph.passes.inductor.wide_halves import wide_halves
from monograph.passes.inductor.wide_variances import wide_variances
from monograph.passes.model_update import model_update
from monograph.passes.run import AddedPass, OfCollectives, OnWhole, Pass
from monograph.passes.schedule_updates import schedule_updates
from monograph.settings import Settings, pass_name


class Runs(StrEnum):
    """When a pass runs, unless it is switched by name."""

    ALWAYS = "always"
    COMPILED = "on compiled backends"
    TOGETHER = "in steps of several processes"
    ASKED = "when switched on"


@dataclass(frozen=True)
class Row:
    """A pass: what it does in a line, when it runs, whether it keeps every bit, and the user's switch for it."""

    run: Pass
    about: str
    runs: Runs = Runs.ALWAYS
    keeps_bits: bool = True
    switch: str = ""

    @property
    def name(self) -> str:
        """The name of the pass."""
        return pass_name(self.run)

    @property
    def how_to_switch_on(self) -> str:
        """What a user writes."""
        return f"graph.config.{self.switch}()" if self.switch else f'graph.config.enable_pass("{self.name}")'

    def is_on(self, settings: Settings) -> bool:
        """True if it runs under these settings."""
        by_itself = self.runs in (Runs.ALWAYS, Runs.TOGETHER) or (
            self.runs is Runs.COMPILED and settings.is_compiled
        )
        return dict(settings.passes).get(self.name, by_itself)


# Ops on lists make all updates wait for the last gradient, and compilers merge single ops themselves: `model_update`
# waits to be asked. `schedule_updates` would raise the peak of memory on `aten`, where all new state lives until the
# step has ended.
PASSES: tuple[Row, ...] = (
    Row(
        fused_to_single,
        "writes the update of a fused optimizer as formulas for single tensors, which the compiler fuses its own way",
        Runs.COMPILED,
        keeps_bits=False,
    ),
    Row(
        canonicalise,
        "drops `detach`, views that change nothing (`t` of `t`), and copies that nobody can tell from the original",
    ),
    Row(fold_constants, "computes arithmetic on known Python numbers"),
    Row(cse, "computes once what is computed twice from the same inputs"),
    Row(dce, "drops ops whose results nothing reads"),
    Row(
        cast_scale,
        "unscales each gradient next to its cast, instead of all in one op",
        Runs.COMPILED,
        keeps_bits=False,
        switch="allow_fuse_cast_scale",
    ),
    Row(
        add_to_output,
        "lets a matrix product add to another value: `add(mm(a, b), c)` becomes `addmm(c, a, b)`",
        Runs.COMPILED,
        keeps_bits=False,
        switch="allow_fuse_add_to_output",
    ),
    Row(
        model_update,
        "writes the optimizer's arithmetic for all parameters as few ops on lists of tensors",
        Runs.ASKED,
        keeps_bits=False,
        switch="allow_fuse_model_update_ops",
    ),
    Row(
        OnWhole(gate_nonfinite, communicates=True),
        "takes over new state only if the whole step is finite",
        Runs.ASKED,
        switch="detect_nonfinite",
    ),
    Row(
        OfCollectives(merge_collectives, communicates=True),
        "merges collectives, and starts them as early as possible",
        Runs.TOGETHER,
    ),
    Row(schedule_updates, "runs each update as soon as its gradient is there", Runs.COMPILED),
)
PASS_NAMES = tuple(row.name for row in PASSES)

# On the way to Inductor, whose formulas for some ops are not eager's. Bits are those that compiled code promises.
INDUCTOR_PASSES: tuple[Row, ...] = (
    Row(inline_parts, "inlines the micro-step of an accumulating step: the compiler sees one flat graph"),
    Row(
        check_values,
        "checks values as eager's kernels do, where the compiler has a formula that accepts any value",
    ),
    Row(
        recurrent,
        "writes recurrent layers in float32 as products and a loop, and keeps other fused layers as one op",
    ),
    Row(foreach_to_single, "takes ops on lists of tensors apart: the compiler merges single ones"),
    Row(wide_variances, "computes variances in float64, as eager's kernels do", keeps_bits=False),
    Row(
        wide_halves,
        "computes ops that the compiler takes apart in float32, and rounds once",
        keeps_bits=False,
    ),
    Row(small_types, "gives ops on `bool` and `uint8` the types and shapes of eager mode"),
    Row(
        scalars_to_tensors,
        "makes tensors without dimensions of numbers that may change, such as learning rates",
    ),
    Row(stack_numbers, "computes numbers that all updates share in one row"),
)


def pipeline(settings: Settings) -> tuple[Pass, ...]:
    """The passes for these settings, in order; a pass of the user's comes after the one that it names, or last."""
    rows = list(PASSES)
    for function, after in settings.added_passes:
        names = [row.name for row in rows]
        place = len(rows) if after is None else names.index(after) + 1
        rows.insert(place, Row(AddedPass(function), "one of the user's"))
    return tuple(row.run for row in rows if row.is_on(settings))


def keeps_bits(settings: Settings) -> bool:
    """True if no pass over the step may round under these settings."""
    return all(row.keeps_bits for row in PASSES if row.is_on(settings))
