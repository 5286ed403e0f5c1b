"""How long a capture takes, beside torch's own tracer on forward and backward alone.

    python -m benchmarks.capture [--rounds 3] [--peer] [workload ...]

Processor time of one thread, the smallest of some rounds in turn. Each workload trains with AdamW. "torch" is
`make_fx(tracing_mode="fake")` of forward, loss and gradients; "capture" is that of the whole step, the update included;
"first call" is all of the first call of a graph on `aten`, passes and plans too, less one step. `--peer` adds the first
call of `torch.compile(backend="aot_eager")` for the same step, the optimizer left to eager mode.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import monograph as mg
from benchmarks.workload import Batch, Workload, seeded_batches, seeded_model
from benchmarks.workloads import all_workloads


class Step(mg.Graph):
    """Forward, loss, backward, AdamW."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def build(self, *batch: Tensor) -> Tensor:
        """The loss of the step."""
        *inputs, target = batch
        loss = self.loss(self.model(*inputs), target)
        loss.backward()
        return loss


def seconds(call: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def traced_by_torch(workload: Workload, batch: Batch) -> dict[str, float]:
    """Seconds of `make_fx` on forward, loss and gradients."""
    model = seeded_model(workload)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def step(state: dict[str, Tensor], *batch: Tensor) -> Any:
        *inputs, target = batch
        loss = workload.loss(torch.func.functional_call(model, state, tuple(inputs)), target)
        return loss, torch.autograd.grad(loss, [state[name] for name in names], allow_unused=True)

    return {"torch": seconds(lambda: make_fx(step, tracing_mode="fake")(state, *batch))}


def captured(workload: Workload, batch: Batch) -> dict[str, float]:
    """Seconds of the first call of a graph less those of the step itself, and of its part that is the capture."""
    model = seeded_model(workload)
    graph = Step(model, workload.loss)
    start = time.perf_counter()
    first = seconds(lambda: graph(*batch))
    part = graph.builds[0].stages[0].seconds / (time.perf_counter() - start)  # by the clock
    step = min(seconds(lambda: graph(*batch)) for _ in range(2))
    return {"capture": first * part, "first call": first - step}


def compiled_by_torch(workload: Workload, batch: Batch) -> dict[str, float]:
    """Seconds of the first step under `torch.compile(backend="aot_eager")`."""
    torch.compiler.reset()
    model = seeded_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(*batch: Tensor) -> Tensor:
        *inputs, target = batch
        return workload.loss(model(*inputs), target)

    compiled = torch.compile(forward, backend="aot_eager")

    def step() -> None:
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = seconds(step)
    return {"aot_eager": first - min(seconds(step) for _ in range(2))}


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = all_workloads(smoke=asked.smoke)
    warm = all_workloads(smoke=True)["mlp64"]
    measures = [traced_by_torch, captured, *([compiled_by_torch] if asked.peer else [])]
    for measure in measures:
        measure(warm, seeded_batches(warm)[0])  # imports
    for name in asked.workloads or found:
        batch = seeded_batches(found[name])[0]
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(asked.rounds):
            for measure in measures:
                for what, value in measure(found[name], batch).items():
                    times[what].append(value)
        best = {what: min(some) for what, some in times.items()}
        told = "  ".join(f"{what} {value:6.3f} s" for what, value in best.items())
        ratios = "  ".join(f"{what} / torch {best[what] / best['torch']:.2f}" for what in list(best)[1:])
        print(f"{name:12} {told}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
