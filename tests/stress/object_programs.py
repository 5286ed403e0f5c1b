"""Random programs over random Python objects, and changes of these: is any replay stale?

`python -m tests.stress.object_programs --trials 20000` makes that many changes; `--seed` says which program comes first.
The exit status is 1 if a graph gave another number than eager mode and no error.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch

import monograph as mg
from tests.support.garbage import collect_quickly
from tests.support.object_programs import Program

X = torch.linspace(-1.0, 1.0, 3)
CHANGES = 8  # of one program


@dataclass
class Count:
    """What became of the calls."""

    changes: int = 0
    effective: int = 0  # after which eager mode gives another number
    refused: int = 0
    builds: int = 0


class Plain:
    """What build() runs on in plain PyTorch."""


def run_program(seed: int, count: Count) -> list[str]:
    """Call one program before and after each of some changes; gives what was stale."""
    program = Program(seed)
    graph = type("Step", (mg.Graph,), {"build": program.build})()
    plain: Any = Plain()
    if not isinstance(program.root, torch.nn.Module):
        graph.root = plain.root = program.root
    stale, done = [], []
    before = None
    for name, change in [("nothing", lambda: None), *program.some_changes(CHANGES)]:
        change()
        done.append(name)
        try:
            expected = program.build(plain, X)
        except Exception:  # a path is gone: eager mode fails as well
            break
        count.changes += 1
        count.effective += before is not None and not torch.equal(before, expected)
        before = expected
        try:
            got = graph(X)
        except mg.MonographError as error:
            count.refused += 1
            if "capture failed" in str(error):
                stale.append(f"program {seed}: {done}: {error}")
            continue
        if not torch.equal(expected, got):
            stale.append(
                f"program {seed} after {done}: {expected.tolist()} != {got.tolist()}\n{program.source}"
            )
            break
    count.builds += len(graph.builds)
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    collect_quickly()
    logging.getLogger("monograph").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    count, seed, stale = Count(), options.seed, 0
    while count.changes < options.trials:
        for line in run_program(seed, count):
            stale += 1
            print(line, flush=True)
        seed += 1
        if seed % 100 == 0:
            print(f"{seed} programs, {count}, {stale} stale", flush=True)
    print(f"seeds {options.seed} to {seed - 1}: {count}, {stale} stale")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
