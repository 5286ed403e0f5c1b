"""A step compiled for `inductor` by another process, at low priority, while training goes on.

`python -m monograph.backends.beside FILE` is that process: it reads a program as JSON, and what it compiles is found in the cache.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from monograph.artifact.programs.serialize import program_from_json, program_to_json
from monograph.backends.in_stages import lower
from monograph.backends.lowering import LoweringRequest
from monograph.checkpoint.errors import Refused
from monograph.compat.distributed.fake_group import pretend_to_have
from monograph.compat.distributed.groups import group_size
from monograph.compat.inductor.disk_cache import new_folder
from monograph.distributed.programs.collectives import groups_in
from monograph.elementwise.compiling import ended, started
from monograph.errors import BackendError
from monograph.plan.plan import make_plan
from monograph.settings import Settings

LOGGER = logging.getLogger("monograph")

_PRIORITY: Final = 10  # a tenth of each processor, where the training takes all: at the lowest it would take ten times as long
_LOOK_EVERY: Final = 0.5  # seconds between two looks whether the training is there


class CompiledBeside:
    """The process that compiles one step. It ends with its owner, and belongs to the process that began it."""

    def __init__(self, order: LoweringRequest) -> None:
        """Begin. Raises BackendError if no process can do it."""
        try:
            program = program_to_json(order.plan.program)
            folder = new_folder()
        except Refused as error:
            raise BackendError(f"another process cannot be given the step: {error}") from error
        except OSError as error:
            raise BackendError(f"compiled code can be kept nowhere: {error.strerror}") from error
        path, self._messages = folder / "step.json", folder / "messages.txt"
        self._pid, runs = os.getpid(), list[subprocess.Popen[bytes]]()
        self._end = weakref.finalize(self, ended, runs, str(folder), self._pid)
        about = {
            "in_place": sorted(order.in_place),
            "kernel_selection": order.settings.kernel_selection,
            "conv_heuristic_search": order.settings.conv_heuristic_search,
            "threads": torch.get_num_threads(),
            "parent": os.getpid(),
            "groups": {name: group_size(name) for name in groups_in(order.plan.program)},
        }
        path.write_text(json.dumps({"program": program, **about}))
        command = [sys.executable, "-m", "monograph.backends.beside", str(path)]
        imports = os.pathsep.join(filter(None, sys.path))
        self._run = started(command, self._messages, {"PYTHONPATH": imports}, _PRIORITY)
        runs.append(self._run)
        self.begun = time.monotonic()
        self._at_exit = partial(_tell_if_given_up, weakref.ref(self), self._pid)
        atexit.register(self._at_exit)  # before the process is ended, which is what `self._end` does then

    @property
    def pid(self) -> int:
        """That of the process."""
        return self._run.pid

    def is_done(self) -> bool:
        """True if it has ended."""
        return os.getpid() == self._pid and self._run.poll() is not None

    def finish(self) -> None:
        """Wait for it. Raises BackendError if it has failed. An interrupt of the wait does not end it."""
        failed = self._run.wait()
        atexit.unregister(self._at_exit)
        try:
            if failed:
                message = self._messages.read_text(errors="replace").strip()
                last = message.splitlines()[-1] if message else "no message"
                raise BackendError(f"the compiling process ends with {self._run.returncode}: {last}")
        finally:
            self._end()


def _tell_if_given_up(compiled: weakref.ref[CompiledBeside], pid: int) -> None:
    """Say at the end of this process that compiling ends with it."""
    found = compiled()
    if found is not None and os.getpid() == pid and not found.is_done():
        LOGGER.warning(
            "inductor has compiled a step for %.0f s and ends unfinished, with this process: the next run begins again; "
            "config.backend('inductor') compiles before the first step instead",
            time.monotonic() - found.begun,
        )


@dataclass(frozen=True)
class _Order:
    """What is in the file."""

    program: Any
    in_place: list[int]
    kernel_selection: bool | None
    conv_heuristic_search: bool
    threads: int
    parent: int
    groups: dict[str, int]  # of processes, by name


def main(path: str) -> None:
    """Compile the step in a file into the cache."""
    order = _Order(**json.loads(Path(path).read_text()))
    _end_with(order.parent)
    torch.set_num_threads(order.threads)
    settings = Settings(
        backend="inductor",
        kernel_selection=order.kernel_selection,
        conv_heuristic_search=order.conv_heuristic_search,
    )
    if order.groups:
        pretend_to_have(order.groups)
    plan = make_plan(program_from_json(order.program, trust=True))
    lower(LoweringRequest(plan, settings, frozenset(order.in_place)))


def _end_with(parent: int) -> None:
    """End when the training does, whatever way that ends.

    The signal that Linux sends at the death of a parent would come with the end of the thread that has begun this.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        os.killpg(0, signal.SIGKILL)  # with the compilers that it has started

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BackendError as error:
        sys.exit(error.message)
