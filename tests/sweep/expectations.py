"""The deviations that are known, each with its cause, and what is wrong with a result that is not as expected.

Each sweep has a file of three parts: `samples` counts what the sweep goes through, `cause` tells each cause once, and
`rows` lists by case which samples show what. A sample that no row names passes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.sweep.pool import Result
from tests.sweep.sweeps import ATEN, Sweep

UPSTREAM = Path(__file__).parent / "upstream"

# The kinds of causes, and how the outcome of a sample may begin that has one.
KINDS = {
    "upstream": (
        "differs",
        "fails",
        "refused",
        "crash",
        "hangs",
        "falls back",
    ),  # a fault of torch, shown by a script
    "undefined": ("differs",),  # eager mode itself leaves values to chance
    "refused": ("refused",),  # by design, with a named error
    "rounding": (
        "differs",
    ),  # what eager mode gives is decided by how it rounds, or in which order it computes
    "eager": ("eager",),  # eager itself refuses the sample
    "fallback": ("falls back",),  # the compiler does not take it: it runs on aten, and a warning says so
}


@dataclass(frozen=True)
class Cause:
    """Why samples deviate; `script` is a file in `upstream/` that shows a fault of torch without Monograph."""

    name: str
    kind: str
    why: str
    script: str = ""


@dataclass(frozen=True)
class Row:
    """Samples of a case that deviate, what they show instead of passing, and the name of the cause."""

    case: str
    cause: str
    shows: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Expectations:
    """The whole file."""

    sweep: Sweep
    torch: str
    samples: Mapping[str, int]
    causes: Mapping[str, Cause]
    rows: tuple[Row, ...]

    @property
    def counts_samples(self) -> bool:
        """True if a case has several samples."""
        return self.sweep.mode == "aten"

    @property
    def cases(self) -> frozenset[str]:
        """The keys of the cases that deviate."""
        return frozenset(row.case for row in self.rows)

    def of(self, case: str) -> dict[int, str]:
        """What each deviating sample of a case shows."""
        return {index: row.shows for row in self.rows if row.case == case for index in row.samples}


def read(sweep: Sweep = ATEN, *, text: str | None = None) -> Expectations:
    """The expectations, by default those of the sweep's file; an AssertionError names what breaks its rules."""
    data = tomllib.loads(sweep.expectations.read_text() if text is None else text)
    causes = {name: Cause(name, **fields) for name, fields in data["cause"].items()}
    rows = tuple(
        Row(case, item["cause"], item["shows"], tuple(item["samples"]))
        for case, items in data["rows"].items()
        for item in items
    )
    found = Expectations(sweep, data["torch"], data["samples"], causes, rows)
    faults = list(_faults(found))
    assert not faults, "\n".join(faults)
    return found


def _faults(expected: Expectations) -> Iterator[str]:
    for cause in expected.causes.values():
        if cause.kind not in KINDS:
            yield f"cause {cause.name}: there is no kind {cause.kind!r}"
        if bool(cause.script) != (cause.kind == "upstream"):
            yield f"cause {cause.name}: a script belongs to a fault of torch, and to nothing else"
        if cause.script and not (UPSTREAM / cause.script).is_file():
            yield f"cause {cause.name}: there is no {UPSTREAM / cause.script}"
    for row in expected.rows:
        if row.cause not in expected.causes:
            yield f"{row.case}: there is no cause {row.cause!r}"
        elif not row.shows.startswith(KINDS.get(expected.causes[row.cause].kind, ())):
            yield f"{row.case}: {row.shows!r} cannot come from {row.cause}, which is {expected.causes[row.cause].kind}"
    for name in expected.causes.keys() - {row.cause for row in expected.rows}:
        yield f"cause {name}: no row has it"
    listed = [(row.case, index) for row in expected.rows for index in row.samples]
    if len(listed) != len(set(listed)):
        yield "a sample is listed twice"


def unexpected(result: Result, expected: Expectations, *, most: int | None = None) -> list[str]:
    """What is not as expected of a case: a sentence for each sample. `most`: only the first samples were run."""
    deviations = expected.of(result.case)
    found = []
    for index, outcome in enumerate(result.outcomes):
        listed = deviations.pop(index, expected.sweep.passes)
        if outcome == listed:
            continue
        told = f": {result.messages[str(index)]}" if str(index) in result.messages else ""
        found.append(f"{result.case}, sample {index}: expected {listed}, got {outcome}{told}")
    found += [
        f"{result.case}: a row names sample {index}, there are {len(result.outcomes)}"
        for index in deviations
        if most is None or index < most
    ]
    return found


def unknown_cases(expected: Expectations, cases: Iterable[str]) -> list[str]:
    """Rows of cases that do not exist."""
    return [f"{case}: there is no such case" for case in sorted(expected.cases - set(cases))]
