"""The parent's side of a worker: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fields import from_fields
from benchmarks.job import Job
from benchmarks.record import Memory, Prepared, Round

LEAVING_SECONDS = 20


class WorkerError(Exception):
    """A worker said that it failed, or is gone."""


@dataclass(frozen=True)
class Home:
    """Where workers run: a folder for their logs and caches, and whether the caches are kept between workers."""

    folder: Path
    shared_cache: Path | None = None


class Client:
    """A running worker."""

    def __init__(self, job: Job, home: Home) -> None:
        self.job = job
        self.folder = Path(tempfile.mkdtemp(dir=home.folder, prefix=f"{job.workload}-{job.peer}-"))
        self.log = self.folder / "stderr.txt"
        self.cache = home.shared_cache or self.folder
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.worker", job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(job.threads, self.cache),
            )

    def prepare(self) -> Prepared:
        """Make the step and take the first ones."""
        return from_fields(Prepared, self.ask("prepare"))

    def round(self, steps: int) -> Round:
        """Run and time some steps."""
        return from_fields(Round, self.ask("round", steps=steps))

    def memory(self) -> Memory:
        """Measure resident memory."""
        return from_fields(Memory, self.ask("memory"))

    def flops(self) -> int:
        """Count the operations of a step."""
        return int(self.ask("flops"))

    def gemm(self) -> dict[str, float]:
        """Measure the machine's matrix products."""
        return dict(self.ask("gemm"))

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self.last_words()) from None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self.last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["answer"]

    def last_words(self) -> str:
        """The last line that the worker wrote before it ended."""
        status = self.process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"the worker ended with status {status}: {lines[-1] if lines else 'it wrote nothing'}"

    def close(self) -> None:
        """End the worker: without more requests it leaves, and takes the helpers of its compiler with it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=LEAVING_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def environment(threads: int, cache: Path) -> dict[str, str]:
    """The worker's environment: its threads, the modules of this process, and caches of compiled code that begin empty."""
    number = str(threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "MONOGRAPH_CACHE_DIR": str(cache / "monograph"),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Let this process and the workers that it starts run on as many cores as they have threads."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:threads]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
