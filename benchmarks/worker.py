"""One process for one competitor: it prepares a step, and runs and times it on request.

`python -m benchmarks.worker JOB` reads one request per line from its input, `{"command": ..., ...}`, and writes
one answer per line. The parent sees to it that only one worker runs at a time.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TextIO

import numpy as np
import torch

from benchmarks.competitor import Competitor
from benchmarks.flops import count_flops
from benchmarks.job import Job
from benchmarks.peers import REFERENCE
from benchmarks.record import Memory, Prepared, Round
from benchmarks.setting import Setting
from benchmarks.torch_peers import torch_competitor
from benchmarks.workload import Workload
from benchmarks.workloads import all_workloads
from monograph.inspect.roofline import gemm_flops_per_second

CHECKED_STEPS = 3  # their losses are compared, and what they did to the parameters
WARM_STEPS = 4  # after those; torch.compile compiles again at the second and third step
SINGLE_STEPS = 200  # at most
SINGLE_SECONDS = 0.1
STATUS = Path("/proc/self/status")


class Worker:
    """Holds the competitor and its place in the batches."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.workload: Workload = all_workloads(smoke=job.smoke)[job.workload]
        make = competitor_maker(job)
        self.start_bytes = resident_bytes("VmRSS")
        self.make: Callable[[], Competitor] = make
        self.competitor: Competitor | None = None
        self.turns: Iterator[tuple[Any, ...]] = iter(())
        self.first_peak = 0

    def prepare(self) -> Prepared:
        """Make the competitor, take its first steps, and go on until it runs at full speed."""
        self.competitor = self.make()
        self.turns = itertools.cycle(self.competitor.batches)
        before = {name: np.array(item) for name, item in self.competitor.parameters().items()}
        first = [self.single_step() for _ in range(CHECKED_STEPS)]
        after = self.competitor.parameters()
        moved = {name: float(np.linalg.norm(np.array(after[name]) - item)) for name, item in before.items()}
        warm = [self.single_step() for _ in range(WARM_STEPS)]
        seconds = [seconds for seconds, _ in first + warm]
        steady = min(seconds)
        self.first_peak = resident_bytes("VmHWM") - self.start_bytes
        return Prepared(
            losses=tuple(loss for _, loss in first),
            moved=moved,
            first_step_seconds=seconds[0],
            compile_seconds=max(0.0, sum(seconds) - len(seconds) * steady),
            step_seconds=steady,
            capture_seconds=self.competitor.capture_seconds(),
        )

    def single_step(self) -> tuple[float, float]:
        """One step with its seconds and its loss."""
        assert self.competitor is not None
        batch = next(self.turns)
        start = perf_counter()
        loss = self.competitor.read(self.competitor.step(*batch))
        return perf_counter() - start, loss

    def round(self, steps: int) -> Round:
        """`steps` steps in a row, waited for at the end, and then a few one by one."""
        assert self.competitor is not None
        self.single_step()  # the caches belonged to another worker
        step = self.competitor.step
        batches = list(itertools.islice(self.turns, steps))
        wall, cpu = perf_counter(), process_time()
        for batch in batches:
            loss = step(*batch)
        self.competitor.read(loss)
        wall, cpu = perf_counter() - wall, process_time() - cpu
        fewer = max(1, min(SINGLE_STEPS, int(SINGLE_SECONDS / (wall / steps))))
        fastest = min(self.single_step()[0] for _ in range(fewer))
        return Round(steps, wall, cpu, fastest)

    def memory(self) -> Memory:
        """Resident memory at its peak while stepping. Freed memory that the allocator kept is given back before."""
        gc.collect()
        trim_heap()
        rest = resident_bytes("VmRSS")
        reset_peak()
        for _ in range(CHECKED_STEPS):
            self.single_step()
        peak = max(rest, resident_bytes("VmHWM"))
        return Memory(peak - self.start_bytes, peak - rest, self.first_peak)

    def flops(self) -> int:
        """Floating point operations of the matrix products and convolutions of one step, backward included."""
        return count_flops(self.single_step)

    def gemm(self) -> dict[str, float]:
        """What the machine reaches in large matrix products."""
        return gemm_flops_per_second(smoke=self.job.smoke)


def competitor_maker(job: Job) -> Callable[[], Competitor]:
    """What makes the competitor; imports all it needs."""
    workload = all_workloads(smoke=job.smoke)[job.workload]
    if job.peer == "jax":
        # by its name, so that no other worker imports JAX
        module = importlib.import_module("benchmarks.jax_peer")
        return lambda: module.jax_competitor(workload, job.setting)
    setting = Setting("single") if job.peer == REFERENCE else job.setting
    return lambda: torch_competitor(workload, job.peer, setting)


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process; 0 where the system does not say."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Let VmHWM begin again at what is resident now."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Give what is free in the heap back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more; a failure is an answer too."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("command"))(**request)
        except Exception as error:
            reply: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
        else:
            reply = {"answer": answer if isinstance(answer, int | dict) else asdict(answer)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def main() -> None:
    """The worker's process: answers go where the output went, everything that is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(job.threads)
    serve(Worker(job), sys.stdin, answers)


if __name__ == "__main__":
    main()
