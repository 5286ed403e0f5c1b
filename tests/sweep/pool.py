"""The parent's side of the workers: hands out cases, keeps time, restarts a worker that crashed or hangs."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sweep.cases import SweepCase
from tests.sweep.sweeps import ATEN, ROOT, Sweep

START_SECONDS = 300.0
WORKER = (sys.executable, "-m", "tests.sweep.worker")


@dataclass
class Result:
    """What became of each sample of a case: its outcome, and a message if it does not pass."""

    case: str
    outcomes: list[str] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, index: int, outcome: str, message: str = "") -> None:
        """Record the next sample."""
        assert index == len(self.outcomes), (self.case, index)
        self.outcomes.append(outcome)
        if message:
            self.messages[str(index)] = message


class Worker:
    """One child process, started when it is needed."""

    def __init__(
        self, log: Path, *, sweep: Sweep = ATEN, command: Sequence[str] = WORKER, seconds: float | None = None
    ) -> None:
        self._log = log
        self._sweep = sweep
        self._command = command
        self._seconds = sweep.sample_seconds if seconds is None else seconds
        self._process: subprocess.Popen[str] | None = None
        self._late = False

    def run(self, case: SweepCase, most: int) -> Result:
        """Run the samples of a case; one that ends the process is recorded, and the next ones follow."""
        began, result = time.monotonic(), Result(case.key)
        while not self._run_from(len(result.outcomes), case, most, result):
            pass
        result.seconds = round(time.monotonic() - began, 3)
        return result

    def close(self) -> None:
        """End the child process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _run_from(self, first: int, case: SweepCase, most: int, result: Result) -> bool:
        """True once the case is through; False if the process ended in a sample: it is recorded, others follow."""
        process = self._started()
        assert process.stdin is not None
        request = {"mode": self._sweep.mode, "case": case.key, "first": first, "most": most}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        begun = False
        while (answer := self._answer(process, self._seconds)) is not None:
            if "done" in answer:
                return True
            begun = begun or "begins" in answer
            if "sample" in answer:
                result.add(answer["sample"], answer["outcome"], answer["message"])
        process.wait()
        self._process = None
        result.add(len(result.outcomes), "hangs" if self._late else f"crash: {_signal(process.returncode)}")
        return not begun  # the samples themselves could not be made: there is nothing to go on with

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, **self._sweep.environment, "OMP_NUM_THREADS": "1"},
                )
            ready = self._answer(self._process, START_SECONDS)
            assert ready is not None, f"a worker does not start: see {self._log}"
        return self._process

    def _answer(self, process: subprocess.Popen[str], seconds: float) -> dict[str, Any] | None:
        """The next line of the child, None if it ended or was ended for taking too long."""
        assert process.stdout is not None
        self._late = False
        timer = threading.Timer(seconds, self._end, [process])
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        return json.loads(line) if line.endswith("\n") else None

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._late = True
        process.kill()


def run_cases(
    cases: Iterable[SweepCase],
    *,
    most: int,
    workers: int,
    folder: Path,
    sweep: Sweep = ATEN,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Result]:
    """The result of each case as it comes, from several processes at once; no new case begins after `stop()`."""
    waiting: queue.SimpleQueue[SweepCase] = queue.SimpleQueue()
    results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work(worker: Worker) -> None:
        try:
            while not stop():
                results.put(worker.run(waiting.get_nowait(), most))
        except queue.Empty:
            pass
        except BaseException as error:
            results.put(error)
        finally:
            worker.close()
            results.put(None)

    crew = [Worker(folder / f"worker-{number}.log", sweep=sweep) for number in range(workers)]
    for worker in crew:
        threading.Thread(target=work, args=(worker,), daemon=True).start()
    try:
        yield from _gathered(results, workers)
    finally:
        for worker in crew:
            worker.close()


def _gathered(results: queue.SimpleQueue[Result | BaseException | None], workers: int) -> Iterator[Result]:
    while workers:
        item = results.get()
        if item is None:
            workers -= 1
        elif isinstance(item, BaseException):
            raise item
        else:
            yield item


def _signal(returncode: int) -> str:
    return signal.Signals(-returncode).name if returncode < 0 else f"exit {returncode}"
