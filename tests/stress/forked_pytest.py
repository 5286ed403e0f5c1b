"""Runs pytest in forks of a process that has imported torch, which takes longer than most runs.

Started by `mutate_package` in the tree whose tests are run. An order is a line of JSON, and so is its answer, the exit
status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

TIMEOUT = -1


def run(order: dict[str, Any]) -> int:
    """The exit status of pytest, or TIMEOUT."""
    end = time.monotonic() + order["seconds"]
    child = os.fork()
    if child == 0:
        os.setsid()
        _redirect(order["output"])
        os.environ.update(order["environment"])
        sys.exit(int(import_module("pytest").main(order["arguments"])))
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done and time.monotonic() < end:
            time.sleep(0.02)
            continue
        with suppress(ProcessLookupError):  # with the processes that tests have left
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) if done else TIMEOUT


def _redirect(output: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def main() -> None:
    sys.path[0] = os.getcwd()
    import_module("torch._inductor.compile_fx")
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
