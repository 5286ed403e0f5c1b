"""How much memory a training step needs, under eager mode, Monograph, and the ways to use `torch.compile`.

    python -m benchmarks.memory [--threads 1] [--smoke] [--cache FOLDER] [--json FILE] [--sides a,b] [workload ...]

Each side of a workload runs in two processes, the second of which finds in a cache what the first has compiled, as far as its
compiler keeps it. Two figures, in MiB, both without what is the same for all sides: parameters, buffers, state of the
optimizer, and batches.

`tracked` is the most bytes of tensors at once, as torch's allocator counts them. `resident` is the most resident memory of
the process, by the system's own high-water mark, less what was resident between two steps besides tensors: so compilers, modules
and libraries do not count, but blocks that an allocator keeps, gaps between blocks, and scratch memory of libraries do. Free
heap is given back to the system before. `planned` is what Monograph's plan says before the step runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import monograph as mg
from benchmarks.client import environment, pinned
from benchmarks.machine import cpu_name, versions
from benchmarks.setting import Setting
from benchmarks.tables import NONE, Table
from benchmarks.torch_peers import torch_competitor
from benchmarks.worker import reset_peak, resident_bytes, trim_heap
from benchmarks.workload import Workload
from benchmarks.workloads import all_workloads, unet
from monograph.runtime.one_piece import give_back

MIB = 2**20
WARM_STEPS = 4  # torch.compile compiles again at the second and third step
MEASURED_STEPS = 3


@dataclass(frozen=True)
class Side:
    """One way to run a step."""

    title: str
    peer: str
    setting: Setting
    is_torch: bool = False  # a way of `torch.compile`


SIDES = {
    "eager": Side("eager", "eager", Setting("foreach")),
    "eager-fused": Side("eager, fused update", "eager", Setting("fused")),
    "aten": Side("aten", "monograph-aten", Setting("foreach")),
    "inductor": Side("inductor", "monograph-inductor", Setting("foreach")),
    "compile": Side("compiled model", "compile", Setting("fused", compiled_update=False), is_torch=True),
    "compile-update": Side("compiled model, compiled update", "compile", Setting("foreach"), is_torch=True),
    "compile-step": Side("compiled step", "compile-step", Setting("foreach"), is_torch=True),
}


@dataclass(frozen=True)
class Measured:
    """The bytes of one side beyond state and batches, and of them what lives between two steps."""

    tracked: int
    resident: int
    kept: int
    planned: int | None = None


def workloads(*, smoke: bool) -> dict[str, Workload]:
    """Those of the timings, and one more."""
    extra = unet.workload(smoke=smoke)
    return {**all_workloads(smoke=smoke), extra.name: extra}


def measured(workload: Workload, side: Side) -> Measured:
    """Measure one side in this process."""
    competitor = torch_competitor(workload, side.peer, side.setting)
    batches = cycle(competitor.batches)

    def step() -> None:
        competitor.read(competitor.step(*next(batches)))

    for _ in range(WARM_STEPS):
        step()
    same = common_bytes(competitor.batches)
    tracked = max(most_allocated(step) for _ in range(2))
    gc.collect()
    kept = storage_bytes(live_tensors()) - same
    give_back()
    trim_heap()
    rest = resident_bytes("VmRSS")
    reset_peak()
    for _ in range(MEASURED_STEPS):
        step()
    moved = max(rest, resident_bytes("VmHWM")) - rest
    planned = None
    if isinstance(graph := competitor.step, mg.Graph):
        planned = graph.builds[-1].memory.peak_bytes
    return Measured(tracked + kept, moved + kept, kept, planned)


def most_allocated(run: Callable[[], None]) -> int:
    """The most bytes of tensors at once while `run` runs, over those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def common_bytes(batches: Iterable[tuple[Any, ...]]) -> int:
    """Bytes that every side holds all the time: parameters, buffers, state of optimizers, batches."""
    found: list[torch.Tensor] = [item for batch in batches for item in batch]
    for item in gc.get_objects():
        if issubclass(type(item), torch.nn.Module):  # a weak reference says that it is what it refers to
            found += [*item._parameters.values(), *item._buffers.values()]
        elif issubclass(type(item), torch.optim.Optimizer):
            found += [value for state in item.state.values() for value in state.values()]
    return storage_bytes(item for item in found if isinstance(item, torch.Tensor))


def live_tensors() -> Iterator[torch.Tensor]:
    """Every tensor of this process that has memory, and its gradient."""
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                yield item.grad


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory of tensors, each piece counted once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


# --- the parent's process ----------------------------------------------------------------------------------------------


def in_fresh_processes(name: str, side: str, *, smoke: bool, threads: int, cache: Path) -> Measured | str:
    """Measure a side twice, each time in a new process; the second counts. A text says why it failed."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.memory",
        "--one",
        side,
        name,
        "--threads",
        str(threads),
    ]
    run = None
    for _ in range(2):
        run = subprocess.run(
            command + ["--smoke"] * smoke,
            env=environment(threads, cache),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            return (run.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
    assert run is not None
    return Measured(**json.loads(run.stdout.splitlines()[-1]))


def tables(found: dict[str, dict[str, Measured | str]]) -> list[Table]:
    """One for each figure."""
    titles = ("tracked MiB above state and batches", "resident MiB above state and batches")
    names = [name for name in SIDES if any(name in row for row in found.values())]
    columns = ("", *(SIDES[name].title for name in names), "inductor / best of torch.compile")
    made = [
        Table(
            title,
            columns,
            tuple((workload, *figures(row, names, field)) for workload, row in found.items()),
        )
        for title, field in zip(titles, ("tracked", "resident"), strict=True)
    ]
    rows = tuple((workload, *exactness(row)) for workload, row in found.items())
    planned = ("", *(f"{side}: {what}" for side in OWN for what in ("planned MiB", "tracked", "resident")))
    return [*made, Table("the plan, and what was measured by it", planned, rows)]


OWN = ("aten", "inductor")


def figures(row: dict[str, Measured | str], names: Iterable[str], field: str) -> Iterator[str]:
    """The cells of a row: a figure for each side, and how `inductor` compares."""
    numbers = {name: getattr(item, field) for name, item in row.items() if isinstance(item, Measured)}
    for name in names:
        yield f"{numbers[name] / MIB:.1f}" if name in numbers else NONE
    peers = [numbers[name] for name in numbers if SIDES[name].is_torch]
    yield f"{numbers['inductor'] / min(peers):.2f}" if peers and "inductor" in numbers else NONE


def exactness(row: dict[str, Measured | str]) -> Iterator[str]:
    """What the plans say, and what the measured figures are by it."""
    for name in OWN:
        item = row.get(name)
        if not isinstance(item, Measured) or not item.planned:
            yield from (NONE, NONE, NONE)
        else:
            yield f"{item.planned / MIB:.1f}"
            yield f"{item.tracked / item.planned:.3f}"
            yield f"{item.resident / item.planned:.3f}"


def main() -> None:
    """Measure what is asked for, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument("--sides", default=",".join(SIDES), help="names, with commas between")
    parser.add_argument("--cache", type=Path, help="keep what is compiled here")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    known = workloads(smoke=asked.smoke)
    if asked.one is not None:
        torch.set_num_threads(asked.threads)
        print(json.dumps(asdict(measured(known[asked.workloads[0]], SIDES[asked.one]))))
        return
    found: dict[str, dict[str, Measured | str]] = {}
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder, pinned(asked.threads):
        cache = asked.cache or Path(folder)
        for name in asked.workloads or known:
            found[name] = {}
            for side in asked.sides.split(","):
                got = in_fresh_processes(name, side, smoke=asked.smoke, threads=asked.threads, cache=cache)
                found[name][side] = got
                print(f"{name}, {side}: {got}", file=sys.stderr, flush=True)
            if asked.json is not None:
                rows = {
                    name: {key: item if isinstance(item, str) else asdict(item) for key, item in row.items()}
                    for name, row in found.items()
                }
                asked.json.write_text(json.dumps(rows, indent=1))
    print(f"{cpu_name()}, {asked.threads} of {os.cpu_count()} threads; {versions()}\n")
    for table in tables(found):
        print(table.markdown(), end="\n\n")


if __name__ == "__main__":
    main()
