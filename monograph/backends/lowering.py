"""Lowered: what a backend makes of a plan, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from monograph.compat.tensors import PointerGuard, pointer_guard
from monograph.ir.meta import metas, value
from monograph.kernels.tuned import TunedKernel
from monograph.passes.run import Stage
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan
from monograph.runtime.malloc import keep_freed_memory
from monograph.runtime.runner import Runner
from monograph.settings import Settings
from monograph.sizes.place import SizePlace


@dataclass(frozen=True)
class LoweringRequest:
    """What is to be lowered: a plan, and the outputs that may be written into their inputs' memory.

    `copied_inputs` gives inputs as those of the first step, in memory of their own, for autotuning. `report` gets how
    far the work is.
    """

    plan: Plan
    settings: Settings
    in_place: Collection[int] = ()
    copied_inputs: Callable[[], list[Any]] | None = None
    report: Callable[[str], object] = str

    @property
    def updates_at_once(self) -> bool:
        """True if each update is to run as soon as its gradient is complete."""
        return self.settings.is_lean or self.plan.limit is not None

    @property
    def chunk_bytes(self) -> int | None:
        """How much updates that run together may make; None for as much as is quick."""
        return None if self.plan.limit is None else 1


@dataclass(frozen=True)
class Assumed:
    """Conditions on sizes that vary, as Python over their names, and where each size is found."""

    conditions: tuple[str, ...]
    places: Mapping[str, SizePlace]


NOTHING_ASSUMED = Assumed((), MappingProxyType({}))


@dataclass(frozen=True)
class LoweredProgram:
    """A runner, the backend that it is of, and the forms that the program took on the way."""

    backend: str
    runner: Runner
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()  # for explain(): what was found in the cache
    choices: tuple[TunedKernel, ...] = ()  # kernels, by measurement
    pointer_guard: PointerGuard = pointer_guard
    assumed: Assumed = NOTHING_ASSUMED  # what its code takes for granted of sizes that vary
    memory: MemoryPlan | None = None  # what its code holds; None: what the plan says
    plan: Plan | None = (
        None  # that its code follows, and that says so; None: it is not known, or that which was given
    )


def kept_for(plan: Plan, memory: MemoryPlan) -> tuple[str, ...]:
    """Let the process keep what a step on CPUs frees, for the next one; a note if it does. `memory` is what its code holds.

    The peak counts twice: the order may be another one than planned, and blocks leave gaps.
    """
    values = [meta for node in plan.program.ops() for meta in metas(value(node))]
    freed = 2 * memory.peak_bytes
    if any(meta.device.type != "cpu" for meta in values) or not keep_freed_memory(freed):
        return ()
    return (f"the process keeps up to {freed / 2**20:.0f} MiB that a step frees for the next one",)
