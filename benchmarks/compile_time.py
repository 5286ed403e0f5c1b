"""Where the first call of a graph on `inductor` spends its time, with nothing kept from before.

    python -m benchmarks.compile_time [--peer] [--smoke] [--rounds 1] [--files] [workload ...]

Each workload is compiled in a process of its own, with empty directories for what Monograph and torch keep. A line for
each stage: seconds of the clock, of this process, and of the processes that it has started. `--files` adds what each
compiler was given, with its seconds of the clock and of the processor. `--peer` adds the first step under
`torch.compile`, model and loss as one function, the update as another. Of several rounds, the one with the least processor time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What is timed, by where it is looked up, and the stage that its time counts for.
STAGES: Mapping[str, str] = {
    "monograph.backends.inductor:run_passes": "passes",
    "monograph.backends.inductor:select_kernels": "kernels: Python",
    "monograph.kernels.compile:KernelCompiler.compiled": "kernels: compiling",
    "monograph.kernels.trials:fastest_of_many": "kernels: trials",
    "monograph.backends.inductor:_compile": "around Inductor",
    "importlib:import_module": "imports",
    "torch._inductor:aot_compile": "Inductor: Python",
    "monograph.backends.inductor:_loaded": "loading",
    "subprocess:run": "Inductor: waiting",
    "subprocess:check_output": "Inductor: waiting",
}
_WHOLE = ("kernels: compiling", "imports")  # what is inside them counts for them
# A compiler that notes what it was given and how long it took.
_COMPILER = """#!/bin/bash
TIMEFORMAT="%R %U %S"
exec 3>&1 4>&2
took=$( {{ time {compiler} "$@" 1>&3 2>&4; }} 2>&1 ); code=$?
echo "$took $*" >> {log}
exit $code
"""
_Seconds = list[float]


class _Clock:
    """Seconds of the clock, of this process and of its children for each stage; those of a stage inside another its own."""

    def __init__(self) -> None:
        self.spent: dict[str, _Seconds] = {}
        self._open = ["capture and the step"]
        self._last = _now()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, time counts for a stage."""
        self.charge()
        self._open.append(self._open[-1] if self._open[-1] in _WHOLE else name)
        try:
            yield
        finally:
            self.charge()
            self._open.pop()

    def charge(self) -> None:
        """Add the time since the last change to the stage that is open."""
        now = _now()
        spent = self.spent.setdefault(self._open[-1], [0.0, 0.0, 0.0])
        spent[:] = [sum(item) - before for *item, before in zip(spent, now, self._last, strict=True)]
        self._last = now

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function whose time counts for a stage; in other threads it is left alone."""

        def run(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return call(*args, **options)
            with self.stage(name):
                return call(*args, **options)

        return run

    def watch(self) -> None:
        """Have all stages timed from now on."""
        for place, name in STAGES.items():
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, last, self.timed(getattr(owner, last), name))


def _now() -> _Seconds:
    times = os.times()
    return [time.perf_counter(), times.user + times.system, times.children_user + times.children_system]


def first_step(name: str, peer: str, *, smoke: bool) -> dict[str, _Seconds]:
    """The stages of the first step of a workload in this process."""
    import torch

    from benchmarks.setting import Setting
    from benchmarks.torch_peers import torch_competitor
    from benchmarks.workloads import all_workloads

    torch.set_num_threads(1)
    competitor = torch_competitor(all_workloads(smoke=smoke)[name], peer, Setting())
    clock = _Clock()
    if peer != "compile":
        clock.watch()
    clock.charge()
    clock.spent.clear()
    competitor.step(*competitor.batches[0])
    clock.charge()
    return clock.spent


def measured(name: str, peer: str, *, smoke: bool) -> tuple[dict[str, _Seconds], list[str]]:
    """The stages of a first step in a new process, and what its compilers noted."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as folder:
        log, compiler = Path(folder) / "log", Path(folder) / "g++"
        compiler.write_text(_COMPILER.format(compiler=os.environ.get("CXX", "g++"), log=log))
        compiler.chmod(0o755)
        places = {
            "MONOGRAPH_CACHE_DIR": f"{folder}/monograph",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TMPDIR": folder,
            "CXX": str(compiler),
        }
        command = [sys.executable, "-m", __spec__.name, "--inside", peer, *["--smoke"] * smoke, name]
        done = subprocess.run(command, env={**os.environ, **places}, check=True, stdout=subprocess.PIPE)
        noted = log.read_text().splitlines() if log.exists() else []
    return json.loads(done.stdout.splitlines()[-1]), noted


def _processor(stages: Mapping[str, _Seconds]) -> float:
    return sum(process + children for _, process, children in stages.values())


def _told(name: str, peer: str, stages: Mapping[str, _Seconds], noted: list[str], *, files: bool) -> None:
    total = [sum(item) for item in zip(*stages.values(), strict=True)]
    for stage, (clock, process, children) in [*stages.items(), ("all", total)]:
        print(f"{name:12} {peer:19} {stage:22} {clock:7.2f} {process:7.2f} {children:7.2f}")
    for line in noted if files else ():
        clock_, user, system, given = line.split(" ", 3)
        seconds = float(user) + float(system)
        if seconds > 0.1:
            made = re.search(r"-o (\S+)", given)
            what = Path(made[1]).name if made else given[-60:]
            print(f"{name:12} {peer:19}   {what[-40:]:40} {float(clock_):7.2f} {seconds:7.2f}")
    sys.stdout.flush()


def main() -> None:
    """Print the stages of each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(first_step(asked.workloads[0], asked.inside, smoke=asked.smoke)))
        return
    from benchmarks.workloads import all_workloads

    peers = ["monograph-inductor", *["compile"] * asked.peer]
    print(f"{'workload':12} {'peer':19} {'stage':22} {'clock':>7} {'process':>7} {'others':>7}")
    for name in asked.workloads or all_workloads():
        for peer in peers:
            rounds = [measured(name, peer, smoke=asked.smoke) for _ in range(asked.rounds)]
            best = min(rounds, key=lambda item: _processor(item[0]))
            _told(name, peer, *best, files=asked.files)


if __name__ == "__main__":
    main()
