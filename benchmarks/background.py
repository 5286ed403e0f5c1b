"""What steps take while their compiled code is made beside them, as multiples of eager mode's.

    python -m benchmarks.background [--threads 2] [--smoke] [workload ...]

For each workload eager mode first, then a graph that begins at once: as it comes (`auto`, which goes on by `exact`), and with
`backend("inductor", background=True)`, with nothing kept from before. "first call" is what comes after the capture, in
steps of eager mode; then the median and the 95th percentile of the steps until compiled code takes over, and the median
of as many after it. By the clock: all cores of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import monograph as mg
from benchmarks.setting import Setting
from benchmarks.torch_peers import Parts, eager_step, make_optimizer, own_step
from benchmarks.workload import Batch, Workload, seeded_batches, seeded_model
from benchmarks.workloads import all_workloads

LEAST_STEPS, MOST_SECONDS = 30, 180.0


def parts_of(workload: Workload) -> Parts:
    """Model, optimizer and loss from the seed."""
    model = seeded_model(workload)
    return Parts(model, make_optimizer(workload.update, model, "foreach"), workload.loss)


def seconds_of(step: Callable[..., Tensor], batch: Batch) -> float:
    """What one step takes by the clock."""
    start = time.perf_counter()
    step(*batch)
    return time.perf_counter() - start


def eager_seconds(workload: Workload, batches: Iterator[Batch]) -> float:
    """The median of eager mode's steps over two seconds."""
    step = eager_step(parts_of(workload), Setting())
    step(*next(batches))
    found: list[float] = []
    while len(found) < LEAST_STEPS or sum(found) < 2:
        found.append(seconds_of(step, next(batches)))
    return statistics.median(found)


def compared(workload: Workload, graph: mg.Graph, batches: Iterator[Batch], eager: float, goal: str) -> str:
    """A line about the steps until `goal` is there, and after."""
    first = seconds_of(graph, next(batches)) - graph.builds[0].stages[0].seconds
    before: list[float] = []
    while graph.backend != goal and sum(before) < MOST_SECONDS:
        before.append(seconds_of(graph, next(batches)))
    *before, swap = before
    after = [seconds_of(graph, next(batches)) for _ in range(LEAST_STEPS)]
    worst = statistics.quantiles(before, n=20)[-1]
    return (
        f"{workload.name:12} {goal:9} first call {first / eager:6.1f}  steps until then {len(before):5}, {sum(before):5.1f} s"
        f"  median {statistics.median(before) / eager:.2f}  95 of 100 {worst / eager:.2f}"
        f"  the step of the swap {swap / eager:.1f}  after it {statistics.median(after) / eager:.2f}"
    )


def main() -> None:
    """Print two lines for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--smoke", action="store_true", help="small models")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = all_workloads(smoke=asked.smoke)
    for name in asked.workloads or found:
        workload = found[name]
        batches = itertools.cycle(seeded_batches(workload))
        eager = eager_seconds(workload, batches)
        for backend, goal in (("auto", "exact"), ("inductor", "inductor")):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MONOGRAPH_CACHE_DIR"] = folder
                graph = own_step(parts_of(workload), backend)
                if backend == "inductor":
                    graph.config.backend(backend, background=True)
                print(compared(workload, graph, batches, eager, goal), flush=True)


if __name__ == "__main__":
    main()
