"""Kill the compiler beside a training at random times: steps go on, with the bits of plain PyTorch.

`.venv/bin/python -m tests.stress.kill_compiler --trials 50` takes `auto` and `inductor` in turn, each with an empty cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import monograph as mg
from monograph.internals import upgrades
from monograph.internals.internals import internals_of
from tests.backends.test_exact import OPTIMIZERS, batches, bits, both, check_same

_LATEST = {"auto": 0.3, "inductor": 8.0}  # seconds: about what a compiler takes


def processes_of(graph: mg.Graph) -> list[int]:
    """The groups of processes that compile for a graph."""
    found: list[int] = []
    for upgrade in internals_of(graph).upgrades.pending.values():
        match upgrade:
            case upgrades.ToExact(compilation=compilation) if compilation is not None:
                found += [run.pid for run in compilation._runs]
            case upgrades.ToInductor(compilation=beside) if beside is not None:
                found.append(beside.pid)
    return found


def trial(backend: str, delay: float) -> str:
    """One training; gives the backend that it ends on. Raises AssertionError if a bit differs."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MONOGRAPH_CACHE_DIR"] = folder
        eager, graph = both(OPTIMIZERS["adamw"], backend="auto")
        if backend == "inductor":
            graph.config.backend(backend, background=True, swap_at=1_000_000)  # its bits would be others
        data, number, killed = batches(7), 0, False
        end = time.monotonic() + delay
        left = 20
        while left:
            assert bits(eager(*data[number % 7])) == bits(graph(*data[number % 7]))
            number += 1
            if time.monotonic() >= end and not killed:
                for pid in processes_of(graph):
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                killed = True
            left -= killed
        check_same(eager, graph)
        found = graph.backend
        del eager, graph
        gc.collect()  # it is in cycles
        assert not list(Path(folder).glob("shared/.new-*"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    upgrades._WORTH_IT = 0.0
    draw = random.Random(options.seed)
    for number in range(options.trials):
        backend = "auto" if number % 2 else "inductor"
        delay = draw.uniform(0.0, _LATEST[backend])
        print(f"{number}: {backend}, killed after {delay:.2f} s, ends on {trial(backend, delay)}", flush=True)


if __name__ == "__main__":
    main()
