"""Faults put into the package, one at a time: its tests must notice each.

`.venv/bin/python -m tests.stress.mutate_package` copies the tree, changes one place, and runs tests until one fails:
those named with the fault, and with `--all` the whole quick suite where they pass. `--tree` does so in another tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from tests.stress import forked_pytest
from tests.stress.forked_pytest import TIMEOUT
from tests.stress.guard_mutations import GUARDS
from tests.stress.mutations import Misplaced, Mutation, Package
from tests.stress.package_mutations import PACKAGE

ROOT = Path(__file__).parents[2]
MUTATIONS = (*PACKAGE, *GUARDS)
_LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "shared")
_LONGEST = 900.0  # seconds of a run; a mutant that hangs is caught
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no")
_STAMPS = count(1_000_000_000)  # times of files: no two texts of one file share their compiled code


@dataclass(frozen=True)
class Outcome:
    """What happened to a mutant."""

    mutation: Mutation
    caught_by: str  # the test that failed; empty if none did
    seconds: float

    def __str__(self) -> str:
        verdict = "caught" if self.caught_by else "SURVIVED"
        end = f"  <- {self.caught_by}" if self.caught_by else ""
        return f"{verdict:8} {self.seconds:6.1f} s  {self.mutation}{end}"


def places_of(tree: Path, wanted: Sequence[str]) -> list[str]:
    """The tests that a tree has of these; one that stands in another folder there is found by its name."""
    tests = tree / "tests"
    found: list[Path] = []
    for pattern in wanted:
        places = sorted(tests.glob(pattern))
        if not places and pattern.endswith(".py"):
            places = sorted(tests.rglob(Path(pattern).name))
        found += places
    return [str(path.relative_to(tree)) for path in dict.fromkeys(found)]


@dataclass
class Copy:
    """A copy of a tree, in which one place at a time is changed."""

    folder: Path

    def tried(self, mutation: Mutation, package: Package, left_out: Sequence[str], *, whole: bool) -> Outcome:
        """Run the tests with a fault in place, but those that fail without one."""
        start = time.monotonic()
        path, text = package.mutated(mutation)
        place = self.folder / path.relative_to(package.root)
        rounds = [places_of(self.folder, mutation.tests) or ["tests"]]
        if whole and rounds != [["tests"]]:
            rounds.append(["tests"])
        own, caught_by = path.read_text(), ""
        _write(place, text)
        try:
            for tests in rounds:
                caught_by = caught_by or next(iter(self.failing(tests, left_out)), "")
        finally:
            _write(place, own)
        return Outcome(mutation, caught_by, time.monotonic() - start)

    def failing(self, tests: Sequence[str], left_out: Sequence[str] = (), *, first: bool = True) -> list[str]:
        """The tests that fail, or the first of them alone."""
        quick = ["-m", "not long"] if '"long:' in Path(self.folder, "pyproject.toml").read_text() else []
        options = [
            *_OPTIONS,
            *quick,
            *(f"--deselect={name}" for name in left_out),
            *(["-x"] if first else []),
        ]
        with tempfile.TemporaryDirectory() as temporary:
            order = {
                "arguments": [*options, *tests],
                "environment": {
                    "MONOGRAPH_CACHE_DIR": f"{temporary}/cache"
                },  # what a mutant compiles is for itself
                "output": f"{temporary}/output",
                "seconds": _LONGEST,
            }
            status = self._answer(json.dumps(order))
            output = Path(temporary, "output").read_text()
        if status in (0, 5):  # 5: there are none
            return []
        if status == TIMEOUT:
            return [f"no end within {_LONGEST:.0f} s"]
        if status in (3, 4):
            raise SystemExit(f"pytest could not run:\n{output}")
        lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        names = [line.split(" ", 1)[1].split(" - ")[0] for line in lines]
        return names or [f"exit status {status}"]

    @cached_property
    def _server(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(Path(forked_pytest.__file__))],
            cwd=self.folder,
            env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _answer(self, order: str) -> int:
        given, taken = self._server.stdin, self._server.stdout
        assert given is not None, "it is a pipe"
        assert taken is not None, "it is a pipe"
        print(order, file=given, flush=True)
        return int(json.loads(taken.readline()))

    def close(self) -> None:
        """End the process that runs its tests."""
        self._server.communicate()


def _write(place: Path, text: str) -> None:
    place.write_text(text)
    stamp = next(_STAMPS)
    os.utime(place, (stamp, stamp))


def chosen(areas: Sequence[str], *, older: bool) -> list[Mutation]:
    """The mutations of some areas, of all if none is named; of an older tree those that it can have."""
    return [
        mutation
        for mutation in MUTATIONS
        if not areas or any(f"{mutation.area}/".startswith(f"{area.strip('/')}/") for area in areas)
        if not (older and mutation.is_new)
    ]


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many were caught, by area."""
    by_area: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_area[outcome.mutation.area].append(outcome)
    lines = [
        f"{area:24} {sum(bool(item.caught_by) for item in found):3} of {len(found):3} caught"
        for area, found in sorted(by_area.items())
    ]
    survivors = [outcome for outcome in outcomes if not outcome.caught_by]
    lines.append(f"{len(survivors)} of {len(outcomes)} faults survived")
    return "\n".join([*lines, *(f"  {outcome.mutation}" for outcome in survivors)])


def run(mutations: Sequence[Mutation], tree: Path, jobs: int, *, whole: bool) -> list[Outcome]:
    """Try all of them, each in a copy of the tree, and print what happens."""
    package = Package(tree)
    copies: SimpleQueue[Copy] = SimpleQueue()
    outcomes: dict[Mutation, Outcome] = {}
    left_out: list[str] = []  # tests that fail without a fault

    def tried(mutation: Mutation) -> None:
        copy = copies.get()
        try:
            outcomes[mutation] = copy.tried(mutation, package, left_out, whole=whole)
        finally:
            copies.put(copy)
        print(outcomes[mutation], flush=True)

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        own = [Copy(Path(temporary, str(number))) for number in range(jobs)]
        for copy in own:
            shutil.copytree(tree, copy.folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            copies.put(copy)
        waiting = list(mutations)
        while waiting:
            list(pool.map(tried, waiting))
            blamed = dict.fromkeys(outcomes[item].caught_by for item in waiting)
            suspects = [name for name in blamed if name.startswith("tests/")]
            wrong = own[0].failing(suspects, first=False) if suspects else []
            left_out += wrong
            waiting = [item for item in waiting if outcomes[item].caught_by in wrong]
            if wrong:
                print(f"these fail without a fault, and are left out: {', '.join(wrong)}", flush=True)
        for copy in own:
            copy.close()
    return [outcomes[mutation] for mutation in mutations]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="AREA", help="such as capture/guards")
    parser.add_argument("--tree", type=Path, default=ROOT, help="an older tree, whose tests are run")
    parser.add_argument("--all", action="store_true", help="the whole quick suite where the named tests pass")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the mutations and where each stands")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="with --first, every so many: to share the work")
    options = parser.parse_args()
    tree = options.tree.resolve()
    mutations = chosen(options.only, older=tree != ROOT)[options.first :: options.step]
    package = Package(tree)
    try:
        places = [package.mutated(mutation) for mutation in mutations]
    except Misplaced as error:
        raise SystemExit(f"{error}: the list is out of date") from None
    if options.list:
        for mutation, (path, _) in zip(mutations, places, strict=True):
            print(f"{path.relative_to(tree)}: {mutation.before.strip()!r} -> {mutation.after.strip()!r}")
        print(f"{len(mutations)} mutations")
        return
    outcomes = run(mutations, tree, options.jobs, whole=options.all)
    print(summary(outcomes))
    sys.exit(any(not outcome.caught_by for outcome in outcomes))


if __name__ == "__main__":
    main()
