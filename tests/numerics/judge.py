"""The judge on every workload of the benchmarks: `python -m tests.numerics.judge [--workload NAME] [--amp]`.

Each workload is trained over five seeds in plain PyTorch in float64, in plain PyTorch in float32 (with `--amp` under
bfloat16 autocast) and as one compiled graph, with fresh data in each step. After one and after ten steps the parameters,
the buffers, the optimizer's state and the loss of all seeds together are judged. In float64 each is trained four more
times, from weights that differ in the last place of float32, or of bfloat16 with `--amp`, where they are rounded to it:
how far that leads is what any rounding may do. Ends with status 1 if a verdict is bad.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import monograph as mg
from benchmarks.torch_peers import make_optimizer
from benchmarks.workload import Workload
from benchmarks.workloads import all_workloads
from monograph.numerics.judge import Distance, FloatReport, against_float64

SEEDS = range(5)
JUDGED = (1, 10)  # steps
NEARBY = range(1, 5)
SUMMED = ("eager_squares", "graph_squares", "rounding_squares", "count")
LARGEST = ("eager_max", "graph_max", "limit")
GROUPS = ("parameters", "buffers", "optimizer state", "loss")
Tensors = dict[str, torch.Tensor]


@dataclass
class Side:
    """One way to train a workload; the same model and optimizer serve every seed."""

    workload: Workload
    dtype: torch.dtype = torch.float32
    amp: bool = False
    compiled: bool = False
    nearby: int = 0  # which change of the first weights in their last place; 0 for none
    rounding: torch.dtype = torch.float32  # whose last place
    graph: mg.Graph | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.model = self.workload.make_model().to(self.dtype)
        self.optimizer = make_optimizer(self.workload.update, self.model, "foreach")
        self.step: Callable[..., torch.Tensor] = self.eager_step
        if self.compiled:
            self.graph = mg.train_graph(self.model, self.workload.loss, self.optimizer)
            self.graph.config.backend("inductor")
            if self.amp:
                self.graph.config.enable_amp(dtype=torch.bfloat16)
            self.step = self.graph

    def eager_step(self, *batch: torch.Tensor) -> torch.Tensor:
        """The usual lines."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            loss = self.workload.loss(self.model(*batch[:-1]), batch[-1])
        loss.backward()
        self.optimizer.step()
        return loss

    def trained(self, seed: int) -> Iterator[dict[str, Tensors]]:
        """All tensors by group, after each of the steps that are judged."""
        self.begin(seed)
        generator = torch.Generator().manual_seed(100 + seed)
        for number in range(1, max(JUDGED) + 1):
            loss = self.step(*map(self.converted, self.workload.make_batch(generator)))
            if self.graph is not None and self.graph.backend != "inductor":
                raise SystemExit(f"{self.workload.name} was not compiled: there is nothing to judge")
            if number in JUDGED:
                yield self.state(loss)

    def begin(self, seed: int) -> None:
        """Weights of a seed, and an optimizer that has not stepped."""
        torch.manual_seed(seed)
        fresh = self.workload.make_model()
        with torch.no_grad():
            for old, new in zip(self.tensors(), tensors_of(fresh), strict=True):
                old.copy_(new)
            if self.nearby:
                self.move(torch.Generator().manual_seed(1000 * self.nearby + seed))
            for state in self.optimizer.state.values():
                for item in state.values():
                    if isinstance(item, torch.Tensor):
                        item.zero_()

    def move(self, generator: torch.Generator) -> None:
        """Change each weight by up to a unit in the last place."""
        unit = torch.finfo(self.rounding).eps
        for tensor in self.tensors():
            if tensor.is_floating_point():
                tensor *= 1 + unit * (2 * torch.rand(tensor.shape, generator=generator, dtype=self.dtype) - 1)

    def tensors(self) -> list[torch.Tensor]:
        return tensors_of(self.model)

    def converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def state(self, loss: torch.Tensor) -> dict[str, Tensors]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {
            f"{names[parameter]}/{key}": item
            for parameter, items in self.optimizer.state.items()
            for key, item in items.items()
            if isinstance(item, torch.Tensor)
        }
        groups = (
            dict(self.model.named_parameters()),
            dict(self.model.named_buffers()),
            state,
            {"loss": loss},
        )
        return {
            group: {name: item.detach().clone() for name, item in tensors.items()}
            for group, tensors in zip(GROUPS, groups, strict=True)
        }


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def verdicts(workload: Workload, *, amp: bool) -> Iterator[tuple[int, str, FloatReport]]:
    """Step, group and report of all seeds together."""
    rounding = torch.bfloat16 if amp else torch.float32
    exact = [Side(workload, torch.float64, nearby=number, rounding=rounding) for number in (0, *NEARBY)]
    sides = [Side(workload, amp=amp), Side(workload, amp=amp, compiled=True), *exact]
    reports = defaultdict[tuple[int, str], list[FloatReport]](list)
    for seed in SEEDS:
        taken = zip(*(side.trained(seed) for side in sides), strict=True)
        for step, (eager, graph, reference, *nearby) in zip(JUDGED, taken, strict=True):
            for group in GROUPS:
                if any(item.is_floating_point() for item in reference[group].values()):
                    others = [item[group] for item in nearby]
                    report = against_float64(reference[group], eager[group], graph[group], others)
                    reports[step, group].append(report)
    for (step, group), found in reports.items():
        yield step, group, together(found, 3.0 if amp else found[0].factor)


def together(reports: Sequence[FloatReport], factor: float) -> FloatReport:
    """The report on the tensors of all reports, those of one path taken as one tensor."""
    distances = []
    for alike in zip(*(report.distances for report in reports), strict=True):
        sums = {name: sum(getattr(item, name) for item in alike) for name in SUMMED}
        largest = {name: max(getattr(item, name) for item in alike) for name in LARGEST}
        distances.append(Distance(path=alike[0].path, **sums, **largest))
    return FloatReport(tuple(distances), factor)


def judge(workload: Workload, *, amp: bool) -> bool:
    """Print a line for each verdict; True if all are good."""
    good = True
    for step, group, report in verdicts(workload, amp=amp):
        ratio = report.graph_rms / max(report.eager_rms, 1e-300)
        beyond = [item for item in report.distances if not item.ok]
        good &= report.ok
        print(
            f"{workload.name} step {step:2} {group}: {'good' if report.ok else 'BAD'},"
            f" root mean square {ratio:.2f} times eager's,"
            f" {len(beyond)} of {len(report.distances)} tensors beyond their limit",
            flush=True,
        )
        for item in beyond:
            print(
                f"    {item.path}: {item.graph_max:.2e}, eager {item.eager_max:.2e}, limit {item.limit:.2e}"
            )
    return good


def main() -> None:
    """Judge all workloads, or those that are named."""
    known = all_workloads(smoke=False)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", choices=sorted(known))
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args()
    good = [judge(known[name], amp=options.amp) for name in options.workload or known]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
