"""Training scripts as they were and as they are with a graph: lines changed, first step, bits, and time of a step.

    python -m benchmarks.ported [--rounds 3] [--threads 1] [name ...]

Each script of examples/ported/eager has its port in examples/ported/graph. A run is a process of its own; the ways
take turns, and times are medians over the rounds. "bits" says whether all losses and all trained tensors on `aten`
are eager's. A step is the time from one loss to the next, with what the loop does between them; of each run the later
half of the steps counts. "first" is the time to the first loss, in the first round: what is compiled is not there yet
if MONOGRAPH_CACHE_DIR names an empty folder.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.tables import Table
from examples.ported import record

FOLDER = Path(record.__file__).parent
NAMES = tuple(sorted(path.stem for path in (FOLDER / "eager").glob("*.py")))
WAYS = ("eager", "aten", "inductor")
COLUMNS = (
    *("script", "lines out / in", "losses and tensors"),
    *(f"first step, {way}" for way in WAYS),
    *(f"step, {way}" for way in WAYS),
)


@dataclass(frozen=True)
class Run:
    """Of one run of a script: seconds to the first loss and of a later step, all losses, a digest of what is trained."""

    first: float
    step: float
    losses: list[float]
    digest: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all if left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(vars(_run(given.names[0], given.one, given.threads))))
        return
    rows = [_row(name, given.rounds, given.threads) for name in given.names or NAMES]
    print(Table("scripts and their ports", COLUMNS, tuple(rows)).markdown())


def changed_lines(name: str) -> tuple[int, int]:
    """How many lines of a script its port lacks, and how many it has besides; what only this module needs is left out."""
    old, new = ((FOLDER / kind / f"{name}.py").read_text().splitlines() for kind in ("eager", "graph"))
    kept = [line for line in new if "record.BACKEND" not in line]
    marks = [line[0] for line in difflib.ndiff(old, kept)]
    return marks.count("-"), marks.count("+")


def _row(name: str, rounds: int, threads: int) -> tuple[str, ...]:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            runs[way].append(in_a_process(name, way, threads))
    out, put = changed_lines(name)
    return (
        name,
        f"{out} / {put}",
        _compared(runs["eager"][0], runs["aten"][0]),
        *(f"{runs[way][0].first:.2f} s" for way in WAYS),
        *(f"{1e3 * statistics.median(run.step for run in runs[way]):.2f} ms" for way in WAYS),
    )


def _compared(eager: Run, aten: Run) -> str:
    if eager.losses == aten.losses and eager.digest == aten.digest:
        return "same bits"
    far = max(abs(one - other) / abs(one) for one, other in zip(eager.losses, aten.losses, strict=True))
    return f"losses within {far:.0e}"


def in_a_process(name: str, way: str, threads: int) -> Run:
    """The run of a script in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ported", name, "--one", way, "--threads", str(threads)]
    environment = os.environ | {"PORTED_BACKEND": way}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _run(name: str, way: str, threads: int) -> Run:
    torch.set_num_threads(threads)
    runpy.run_module(f"examples.ported.{'eager' if way == 'eager' else 'graph'}.{name}", run_name="__main__")
    spans = [after - before for before, after in zip(record.clock, record.clock[1:], strict=False)]
    made = [value for model in record.models for value in model.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in made)).hexdigest()
    return Run(spans[0], statistics.median(spans[len(spans) // 2 :]), record.losses, digest)


if __name__ == "__main__":
    main()
