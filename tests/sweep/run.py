"""A whole sweep: `python -m tests.sweep.run [aten | inductor | special]`; started again it goes on where it stopped.

Results are kept in `results.jsonl` in `build/sweep`, `build/sweep-inductor` or `build/sweep-special`, one line per case,
and belong to one state of the sources: after a change of Monograph, of the sweep or of torch they are made anew (steps that were
compiled are found again). At the end they are compared with what the sweep's file of expectations says.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.sweep.cases import SweepCase
from tests.sweep.expectations import read, unexpected, unknown_cases
from tests.sweep.pool import Result, run_cases
from tests.sweep.samples import MOST
from tests.sweep.special import KINDS_OF_CALLS, special_cases
from tests.sweep.sweeps import INDUCTOR, ROOT, SWEEPS, Sweep, implied

_OF_SAMPLES = ("cases", "samples", "outcomes", "compiled", "worker", "special", "chains")
_SOURCES = ("monograph/**/*.py", *(f"tests/sweep/{name}.py" for name in _OF_SAMPLES))


def digest_of_sources() -> str:
    """What the results stand on: the sources of Monograph and of the sweep, and the version of torch."""
    sha = hashlib.sha256(torch.__version__.encode())
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        sha.update(path.relative_to(ROOT).as_posix().encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()


class Results:
    """The results so far, on disk line by line; a line that a killed sweep left half written is dropped."""

    def __init__(self, path: Path, *, digest: str) -> None:
        self._path = path
        self.found: dict[str, Result] = {}
        head = json.dumps({"digest": digest})
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[1:] if lines[:1] == [head] else []:
            with contextlib.suppress(ValueError):
                result = Result(**json.loads(line))
                self.found[result.case] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in (head, *map(_line, self.found.values()))))

    def add(self, result: Result) -> None:
        """Keep a result."""
        self.found[result.case] = result
        with self._path.open("a") as file:
            file.write(_line(result) + "\n")


def _line(result: Result) -> str:
    return json.dumps(asdict(result))


def main() -> int:
    """Run what is left, compare, report; gives the exit status."""
    options = _options()
    sweep = SWEEPS[options.sweep]
    if options.kinds:
        sweep = replace(sweep, cases=partial(special_cases, options.kinds.split(",")))
    folder = options.folder or sweep.folder
    results = Results(folder / "results.jsonl", digest=digest_of_sources())
    chosen = tuple(case for case in sweep.cases() if fnmatch.fnmatch(case.key, options.only))
    deadline = time.monotonic() + 60 * options.minutes
    for cases in _waves(sweep, chosen):
        _take_implied(sweep, cases, results)
        left = [case for case in cases if case.key not in results.found]
        print(f"{len(cases)} cases, {len(left)} of them to run", flush=True)
        _run(sweep, left, results, deadline, options.workers, folder)
    if missing := sum(case.key not in results.found for case in chosen):
        print(f"{missing} cases are left: start again to go on")
        return 3
    found = [results.found[case.key] for case in chosen]
    report = summary(sweep, chosen, found, whole=len(chosen) == len(sweep.cases()) and not options.kinds)
    (folder / "summary.txt").write_text(report.text)
    print(report.text)
    return 0 if report.ok else 1


def _waves(sweep: Sweep, cases: tuple[SweepCase, ...]) -> list[tuple[SweepCase, ...]]:
    """The cases in the parts that are run one after the other: forwards may follow from the steps before them."""
    if sweep is not INDUCTOR:
        return [cases]
    return [tuple(case for case in cases if case.part == part) for part in ("backward", "forward")]


def _take_implied(sweep: Sweep, cases: tuple[SweepCase, ...], results: Results) -> None:
    if sweep is INDUCTOR:
        passed = {key for key, result in results.found.items() if _passes(sweep, result)}
        for case in implied(cases, passed):
            if case.key not in results.found:
                results.add(Result(case.key, [sweep.passes]))


def _passes(sweep: Sweep, result: Result) -> bool:
    return all(outcome == sweep.passes for outcome in result.outcomes)


def _run(
    sweep: Sweep, cases: list[SweepCase], results: Results, deadline: float, workers: int, folder: Path
) -> None:
    def late() -> bool:
        return time.monotonic() > deadline

    run = run_cases(cases, most=MOST, workers=workers, folder=folder, sweep=sweep, stop=late)
    for number, result in enumerate(run, 1):
        results.add(result)
        if number % 100 == 0:
            print(f"{number} of {len(cases)}", flush=True)


@dataclass(frozen=True)
class Report:
    """The counts of a sweep, and what is not as expected."""

    text: str
    ok: bool


def summary(sweep: Sweep, cases: Sequence[SweepCase], results: Sequence[Result], *, whole: bool) -> Report:
    """Compare results with the expectations; `whole`: every case was run, so that none may be missing."""
    expected = read(sweep)
    wrong = [finding for result in results for finding in unexpected(result, expected)]
    passed: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    total = Counter(case.group for case in cases)
    for case, result in zip(cases, results, strict=True):
        passed[case.group] += _passes(sweep, result)
        samples[case.group] += len(result.outcomes)
        if not result.outcomes:
            wrong.append(f"{case.key}: there are no samples")
    if whole:
        wrong += unknown_cases(expected, (case.key for case in cases))
        wrong += [
            f"{group}: expected {expected.samples.get(group)} samples, got {number}"
            for group, number in samples.items()
            if number != expected.samples.get(group)
        ]
    lines = [
        f"{group}: {passed[group]} of {total[group]} {sweep.passes}, {samples[group]} samples"
        for group in total
    ]
    lines.append(f"{sum(result.seconds for result in results):.0f} seconds of one core")
    lines += ["", f"{len(wrong)} not as expected:", *wrong] if wrong else ["all as expected"]
    return Report("\n".join(lines), not wrong)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", nargs="?", default="aten", choices=SWEEPS)
    parser.add_argument("--only", default="*", help="a pattern of keys, such as 'op_db/linalg*'")
    parser.add_argument(
        "--kinds",
        default="",
        help=f"of the sweep of special values: these kinds of calls alone, of {', '.join(KINDS_OF_CALLS)}",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so long, to go on later"
    )
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
