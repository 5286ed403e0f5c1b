"""Steps of two processes: time and memory beside eager `DistributedDataParallel` and `fully_shard`, and what is hidden.

    python -m benchmarks.ranks [--smoke] [--rounds N] [--hidden] [workload ...]

Each process has one thread, over gloo. All sides of a workload run in the same two processes, in turn, a step each; the time
is the median over rounds of the slower process. `tracked` is the most bytes of tensors that a step holds above those between
steps, in the process that is ahead of the other one, where each collective lasts until it is waited for: what Gloo copies for it
is given back when it ends. `planned` is what Monograph says before it runs.

With `--hidden` collectives take 20 ms each, in a thread that sleeps: what share of that does a step not take longer? Beside it stands what
`graph.plan().predict()` says, given the time that the step takes without any and ten operations to the byte.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from benchmarks.machine import cpu_name, versions
from benchmarks.memory import MIB
from benchmarks.sleeping import NAME, SleepingGroup, register
from benchmarks.tables import NONE, Table
from benchmarks.workload import Workload
from benchmarks.workloads import all_workloads
from monograph.runtime.one_piece import most_allocated

SIDES = {
    "DDP, eager": ("ddp", "eager"),
    "DDP, aten": ("ddp", "aten"),
    "DDP, inductor": ("ddp", "inductor"),
    "ZeRO 1, aten": ("zero 1", "aten"),
    "ZeRO 2, aten": ("zero 2", "aten"),
    "ZeRO 2, inductor": ("zero 2", "inductor"),
    "fully_shard, eager": ("fully_shard", "eager"),
    "fully_shard, aten": ("fully_shard", "aten"),
    "fully_shard, inductor": ("fully_shard", "inductor"),
    "ZeRO 3, aten": ("zero 3", "aten"),
    "ZeRO 3, inductor": ("zero 3", "inductor"),
}
SLEEP = 0.02  # seconds
PER_BYTE = 10  # operations that a processor does in the time in which it reads or writes a byte
WARM_STEPS = 3
Figures = dict[str, tuple[float, int, float | None]]  # by side: seconds, tracked and planned bytes


class Step(mg.Graph):
    """A step of a workload."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., torch.Tensor], layout: str, backend: str
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.config.backend(backend)
        if layout.startswith("zero"):
            self.config.enable_zero(stage=int(layout[-1]))
        elif dist.get_backend() == NAME:  # which wrappers do not know
            self.config.enable_data_parallel()

    def build(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss(self.model(*batch[:-1]), batch[-1])
        loss.backward()
        return loss


def stepper(workload: Workload, layout: str, backend: str) -> tuple[Callable[[], Any], Step | None]:
    """A step on a batch of this rank."""
    torch.manual_seed(0)
    model = workload.make_model()
    batch = workload.make_batch(torch.Generator().manual_seed(dist.get_rank()))
    if layout == "ddp" and dist.get_backend() != NAME:
        model = DistributedDataParallel(model)
    elif layout == "fully_shard":
        inside = set[nn.Module]()
        for child in list(model.modules()):
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and child not in inside:
                for layer in child:
                    inside.update(layer.modules())
                    if any(True for _ in layer.parameters()):
                        fully_shard(layer)
        fully_shard(model)
    if backend != "eager":
        step = Step(model, workload.loss, layout, backend)
        return lambda: step(*batch), step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def eager() -> None:
        optimizer.zero_grad()
        workload.loss(model(*batch[:-1]), batch[-1]).backward()
        optimizer.step()

    return eager, None


def measured(workload: Workload, asked: argparse.Namespace) -> Figures:
    """All sides of a workload, in this process."""
    steps = {side: stepper(workload, *how) for side, how in SIDES.items() if how[0] in asked.layouts}
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    for number in range(WARM_STEPS + asked.rounds):
        for side, (step, _) in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if number >= WARM_STEPS:
                seconds[side].append(time.perf_counter() - begin)
    found: Figures = {}
    for side, (step, graph) in steps.items():
        gc.collect()
        planned = None if graph is None else graph.builds[-1].memory.peak_bytes

        def two(step: Callable[[], Any] = step) -> None:  # what the first leaves counts in the second
            step()
            step()

        most = [_held(two, ahead=rank == dist.get_rank(), seconds=4 * max(seconds[side])) for rank in (0, 1)]
        found[side] = statistics.median(seconds[side]), most[dist.get_rank()], planned
    return found


def _held(run: Callable[[], Any], *, ahead: bool, seconds: float) -> int:
    """The most bytes that a run holds. The process that is behind begins so much later, and stays behind."""
    dist.barrier()
    time.sleep(0 if ahead else seconds)
    held = most_allocated(run, everywhere=True) or 0
    dist.barrier()
    return held


def hidden(workload: Workload, asked: argparse.Namespace) -> Figures:
    """In place of seconds the share of the time of collectives that a step does not take longer, and last its seconds without them."""
    found: Figures = {}
    for side, (layout, backend) in SIDES.items():
        if backend == "eager" or layout == "fully_shard" or layout not in asked.layouts:
            continue
        step, _ = stepper(workload, layout, backend)
        times: dict[float, list[float]] = {0.0: [], SLEEP: []}
        for number in range(WARM_STEPS + asked.rounds):
            for pause, those in times.items():
                for group in SleepingGroup.made:
                    group.seconds, group.count = pause, 0
                begin = time.perf_counter()
                step()
                if number >= WARM_STEPS:
                    those.append(time.perf_counter() - begin)
        count = sum(group.count for group in SleepingGroup.made)
        alone = statistics.median(times[0.0])
        found[side] = (1 - (statistics.median(times[SLEEP]) - alone) / (count * SLEEP), count, alone)
    return found


def predicted(workload: Workload, layout: str, seconds: float) -> float:
    """The share that a plan says is hidden, of a step that takes so long without collectives."""
    model, batch = workload.make_model(), workload.make_batch(torch.Generator())
    graph = mg.train_graph(model, workload.loss, torch.optim.AdamW(model.parameters(), lr=1e-3))
    plan = graph.plan(*batch, world_size=2, zero=int(layout[-1]) if layout.startswith("zero") else None)

    def predict(rate: float, latency_seconds: float) -> tuple[float, float]:
        found = plan.predict(
            flops_per_second=rate,
            memory_bytes_per_second=rate / PER_BYTE,
            link_bytes_per_second=float("inf"),
            latency_seconds=latency_seconds,
        )
        return found.work_seconds, found.exposed

    work, _ = predict(1.0, 0.0)
    _, exposed = predict(work / seconds, SLEEP)
    return 1 - exposed


def _rank(rank: int, folder: str, name: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    register()
    backend = NAME if asked.hidden else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    measure = hidden if asked.hidden else measured
    torch.save(measure(all_workloads(smoke=asked.smoke)[name], asked), f"{folder}/{rank}")


def _rows(figures: Figures, workload: Workload, *, is_share: bool) -> Any:
    for side, (value, nbytes, planned) in figures.items():
        if is_share:
            share = predicted(workload, SIDES[side][0], planned or 0.0)
            yield side, str(nbytes), f"{value:.0%}", f"{share:.0%}"
        else:
            yield (
                side,
                f"{value * 1e3:.1f}",
                *(NONE if one is None else f"{one / MIB:.1f}" for one in (nbytes, planned)),
            )


def main() -> None:
    """Measure what is asked for, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*all_workloads(smoke=True)]
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"of {', '.join(names)}; gpt and mobilenetv2 if none"
    )
    parser.add_argument("--rounds", type=int, default=15)
    layouts = [*dict.fromkeys(layout for layout, _ in SIDES.values())]
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument("--hidden", action="store_true", help="collectives that sleep")
    asked = parser.parse_args()
    if unknown := set(asked.workloads) - {*names}:
        parser.error(f"there is no workload {min(unknown)}")
    print(f"{cpu_name()}, 2 processes with a thread each; {versions()}\n")
    for name in asked.workloads or ("gpt", "mobilenetv2"):
        with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
            spawn(_rank, (folder, name, asked), nprocs=2)
            ranks: list[Figures] = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
        slower: Figures = {
            side: (
                min(one[0], other[0]) if asked.hidden else max(one[0], other[0]),
                max(one[1], other[1]),
                one[2],
            )
            for side, one, other in ((side, ranks[0][side], ranks[1][side]) for side in ranks[0])
        }
        columns = (
            ("side", "collectives", "hidden", "by the plan")
            if asked.hidden
            else ("side", "ms", "tracked MiB", "planned MiB")
        )
        print(
            Table(
                name,
                columns,
                tuple(_rows(slower, all_workloads(smoke=asked.smoke)[name], is_share=asked.hidden)),
            ).markdown(),
            end="\n\n",
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
