"""A thread for each model that runs what waits: several requests at once where their rows may share a batch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monograph import ArtifactError, SignatureError
from monograph.serving.limits import Limits, RequestError
from monograph.serving.metrics import Metrics
from monograph.serving.models import ServedModel

LOGGER = logging.getLogger("monograph.serving")


@dataclass(frozen=True, eq=False, repr=False)
class Job:
    """The tensors of a request, and where their results go."""

    tensors: tuple[torch.Tensor, ...]
    arrived: float  # of the monotonic clock
    done: asyncio.Future[list[torch.Tensor]]

    @property
    def rows(self) -> int:
        """How much of a batch it takes."""
        return len(self.tensors[0])

    def shares_with(self, other: Job) -> bool:
        """Whether their rows fit into one batch."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(a.shape[1:] == b.shape[1:] for a, b in pairs)

    def finish(self, results: list[torch.Tensor] | Exception) -> None:
        """Hand the results, or what was wrong, to the one who waits, if there still is one."""

        def settle() -> None:
            if self.done.done():
                return
            if isinstance(results, Exception):
                self.done.set_exception(results)
            else:
                self.done.set_result(results)

        self.done.get_loop().call_soon_threadsafe(settle)


class Batcher:
    """Runs the jobs of one model, oldest first."""

    def __init__(self, model: ServedModel, limits: Limits, metrics: Metrics) -> None:
        self.model, self._limits, self._metrics = model, limits, metrics
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"monograph-{model.name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a job wait its turn."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def withdraw(self, job: Job) -> None:
        """Forget a job that nobody waits for any more, if it does not run yet."""
        with self._changed:
            if (
                job in self._waiting
            ):  # remove() would print the job, tensors and all, to say that it is not there
                self._waiting.remove(job)

    def close(self) -> None:
        """Run what waits, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while jobs := self._next():
            self._run(jobs)

    def _next(self) -> list[Job]:
        """The next jobs, which share a batch; empty when the batcher is closed."""
        with self._changed:
            while True:
                if not self._waiting and self._closed:
                    return []
                left = self._seconds_to_wait() if self._waiting else None
                if left is not None and left <= 0:
                    return self._taken()
                self._changed.wait(left)

    def _seconds_to_wait(self) -> float:
        """How long the oldest job lets others join it."""
        rows = self.model.batch_sizes
        if self._closed or not rows or sum(job.rows for job in self._waiting) >= rows[-1]:
            return 0.0
        return self._waiting[0].arrived + self._limits.delay - time.monotonic()

    def _taken(self) -> list[Job]:
        """The oldest job, and those that fit in after it."""
        first = self._waiting.popleft()
        jobs = [first]
        if self.model.batch_sizes:
            room = self.model.batch_sizes[-1] - first.rows
            for job in list(self._waiting):
                if job.rows <= room and job.shares_with(first):
                    self._waiting.remove(job)
                    jobs.append(job)
                    room -= job.rows
        return jobs

    def _run(self, jobs: Sequence[Job]) -> None:
        start = time.perf_counter()
        try:
            if self.model.batch_sizes:
                results = self.model.run_together([job.tensors for job in jobs])
            else:
                results = [self.model.run(job.tensors) for job in jobs]
        except Exception as error:
            self._failed(jobs, error)
            return
        rows = sum(job.rows for job in jobs) if self.model.batch_sizes else 1
        self._metrics.ran(self.model.name, rows, time.perf_counter() - start)
        for job, result in zip(jobs, results, strict=True):
            job.finish(result)

    def _failed(self, jobs: Sequence[Job], error: Exception) -> None:
        """Let every other request of the batch have its results, and the one at fault its error."""
        if len(jobs) > 1:
            for job in jobs:
                self._run([job])
            return
        answer = _answer(error)
        fields: dict[str, object] = {"model": self.model.name, "status": answer.status}
        if answer.status == 500:  # other errors have what a client sent in their texts
            fields["error"] = str(error)
        level = logging.ERROR if answer.status == 500 else logging.INFO
        LOGGER.log(level, "a request could not be run", extra={"fields": fields})
        jobs[0].finish(answer)


def _answer(error: Exception) -> RequestError:
    """What a client hears of a failure: what is wrong with the request, or only that something is wrong here."""
    if isinstance(error, SignatureError):
        return RequestError(400, error.message.replace("\n  ", "; "))
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return RequestError(503, "the server is out of memory")
    of_op = error.cause if isinstance(error, ArtifactError) else None
    if isinstance(of_op, (IndexError, RuntimeError, ValueError)) and not isinstance(
        of_op, torch.AcceleratorError
    ):
        return RequestError(
            400, "the model cannot take these values: an op refuses them, such as an index out of range"
        )
    return RequestError(500, "the model failed")
