"""The record of a run of the benchmarks. All of it goes into the JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prepared:
    """What a worker reports after its first steps."""

    losses: tuple[float, ...]
    moved: dict[str, float]  # how far these steps took each parameter: the norm of the difference
    first_step_seconds: float
    compile_seconds: float  # what the first steps took beyond steps at full speed
    step_seconds: float  # a step at full speed, roughly
    capture_seconds: float | None = None  # of the first step, the capture before anything was compiled


@dataclass(frozen=True)
class Round:
    """Some steps in a row, and then a few that were timed one by one: a turn, or the turns of a round together."""

    steps: int
    wall_seconds: float
    cpu_seconds: float
    fastest_seconds: float


def joined(turns: Sequence[Round]) -> Round:
    """The turns of a round as one."""
    return Round(
        sum(turn.steps for turn in turns),
        sum(turn.wall_seconds for turn in turns),
        sum(turn.cpu_seconds for turn in turns),
        min(turn.fastest_seconds for turn in turns),
    )


@dataclass(frozen=True)
class Memory:
    """Resident memory of a worker, beyond what it held when its libraries were imported."""

    peak_bytes: int  # the most while stepping
    step_bytes: int  # of these, what a step holds for a while
    start_bytes: int  # the most up to the end of the first steps


@dataclass(frozen=True)
class Trial:
    """One setting of a peer: why it failed, or its times."""

    setting: str
    error: str | None = None
    prepared: Prepared | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def first_seconds(self) -> float:
        """A step at full speed, as the first steps showed it."""
        return self.prepared.step_seconds if self.prepared is not None else math.inf


@dataclass(frozen=True)
class Measured:
    """One peer on one workload: every setting tried, and the rounds of the fastest."""

    peer: str
    title: str
    is_torch: bool
    is_own: bool
    trials: tuple[Trial, ...] = ()
    chosen: Trial | None = None
    rounds: tuple[Round, ...] = ()
    memory: Memory | None = None
    warm: Prepared | None = None  # the first steps of another process, which finds what this one has cached
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """One workload."""

    workload: str
    title: str
    flops: int
    losses: tuple[float, ...]
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Machine:
    """Where and with what the run was made."""

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    system: str
    versions: dict[str, str]
    gemm_flops_per_second: dict[str, float]  # the best of each way to multiply two large matrices


@dataclass(frozen=True)
class Report:
    """A whole run."""

    dates: tuple[str, ...]  # when it began, and when it went on
    command: str
    machine: Machine
    results: tuple[Result, ...]
