"""Many steps in one call of `graph.many`, beside as many calls, and beside JAX's `scan` over the same step.

    taskset -c 1 python -m benchmarks.many [--steps 64] [--rounds 40] [workload ...]

Microseconds of processor time for a step on one thread, the smallest of some rounds in turn. The graph is compiled by
`inductor`; without JAX its column is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.setting import Setting
from benchmarks.torch_peers import Parts, make_optimizer, own_step
from benchmarks.workload import Workload, seeded_batches, seeded_model
from benchmarks.workloads import all_workloads

Run = Callable[[], Any]  # all the steps


def own_sides(workload: Workload, stacks: tuple[Tensor, ...]) -> dict[str, Run]:
    """The steps of one graph by single calls, and by one call."""
    model = seeded_model(workload)
    graph = own_step(
        Parts(model, make_optimizer(workload.update, model, "foreach"), workload.loss), "inductor"
    )
    batches = list(zip(*stacks, strict=True))
    return {"calls": lambda: [graph(*batch) for batch in batches], "many": lambda: graph.many(*stacks)}


def jax_side(workload: Workload, stacks: tuple[Tensor, ...]) -> Run:
    """The steps as one jitted `scan`, which is given its state to overwrite."""
    import jax

    from benchmarks.jax_peer import array, jax_step

    step, held = jax_step(workload, Setting("tree"))
    scanned = jax.jit(lambda held, batches: jax.lax.scan(step, held, batches), donate_argnums=0)
    batches = tuple(map(array, stacks))

    def run() -> None:
        nonlocal held
        held, losses = scanned(held, batches)
        losses.block_until_ready()

    return run


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["mlp64"])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--smoke", action="store_true", help="small models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.workloads:
        workload = all_workloads(smoke=asked.smoke)[name]
        batches = seeded_batches(workload)
        chosen = [batches[index % len(batches)] for index in range(asked.steps)]
        stacks = tuple(map(torch.stack, zip(*chosen, strict=True)))
        sides = own_sides(workload, stacks)
        if find_spec("jax") is not None:
            sides["scan"] = jax_side(workload, stacks)
        best = dict.fromkeys(sides, float("inf"))
        for run in sides.values():
            run()
        for _ in range(asked.rounds):
            for side, run in sides.items():
                start = time.process_time()
                run()
                best[side] = min(best[side], time.process_time() - start)
        times = "  ".join(f"{side} {seconds / asked.steps * 1e6:.1f}" for side, seconds in best.items())
        ratios = "  ".join(
            f"{side} / many {best[side] / best['many']:.2f}" for side in sides if side != "many"
        )
        print(f"{name:12} us a step: {times}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
