"""The sweeps: bitwise on the aten backend; with the `inductor` mode, one compiled step per op; special values in many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.sweep.cases import SweepCase, all_cases
from tests.sweep.special import special_cases

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sweep:
    """What a sweep goes through, what passes, and where its files are."""

    mode: str
    passes: str  # the outcome of a sample as it should be
    sample_seconds: float  # a sample that takes longer hangs
    cases: Callable[[], tuple[SweepCase, ...]]
    expectations: Path
    page: Path
    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """What its workers find in their environment: compiled steps are kept, so that a second run is fast."""
        return {"MONOGRAPH_CACHE_DIR": str(self.folder / "cache")}


def ops() -> tuple[SweepCase, ...]:
    """The cases of the ops, those with a backward first: where such a step passes, its forward has passed."""
    cases = [case for case in all_cases() if case.database == "op_db"]
    return tuple(sorted(cases, key=lambda case: case.part))


def implied(cases: tuple[SweepCase, ...], passed: set[str]) -> Iterator[SweepCase]:
    """The forwards that need no run of their own: their steps with a backward have passed."""
    for case in cases:
        if case.part == "forward" and SweepCase(case.database, case.name, "backward").key in passed:
            yield case


_HERE, _DOCS = ROOT / "tests" / "sweep", ROOT / "docs"

ATEN = Sweep(
    "aten",
    "bitwise",
    120.0,
    all_cases,
    _HERE / "expectations.toml",
    _DOCS / "alignment-table.md",
    ROOT / "build" / "sweep",
)
INDUCTOR = Sweep(
    "inductor",
    "aligned",
    900.0,
    ops,
    _HERE / "expectations-inductor.toml",
    _DOCS / "alignment-table-inductor.md",
    ROOT / "build" / "sweep-inductor",
)
SPECIAL = Sweep(
    "special",
    "as eager",
    1800.0,
    special_cases,
    _HERE / "expectations-special.toml",
    _DOCS / "alignment-table-special.md",
    ROOT / "build" / "sweep-special",
)
SWEEPS = {sweep.mode: sweep for sweep in (ATEN, INDUCTOR, SPECIAL)}
