"""How a scheduler goes a step on: once for each step of the optimizer, also if a graph steps it."""

from __future__ import annotations

import warnings
from typing import Any

from monograph.compat.optimizers import forget_step, step_is_noted

OF_GRAPH = "of_graph"


def may_go_on(scheduler: Any) -> bool:
    """False if the optimizer has not stepped since the last time: OneFlow's scripts step a scheduler of a graph too."""
    if not scheduler.of_graph or step_is_noted(scheduler.optimizer):
        return True
    warnings.warn(
        f"step() of a {type(scheduler).__name__} that a graph steps by itself has no effect; leave the call out",
        stacklevel=3,
    )
    return False


def note_step(scheduler: Any) -> None:
    """To be called when a scheduler has gone on: it waits for the next step of the optimizer."""
    if scheduler.of_graph:
        forget_step(scheduler.optimizer)


def follow_graph(scheduler: Any) -> None:
    """Let a scheduler know that a graph steps it; one of torch's own has no such attribute."""
    if hasattr(type(scheduler), OF_GRAPH):
        scheduler.of_graph = True
        forget_step(scheduler.optimizer)


def print_rate(scheduler: Any, index: int, rate: Any) -> None:
    """Print the new rate of a param group, for `verbose`."""
    kind = type(scheduler).__name__
    print(f"{kind}: step {scheduler.last_epoch}: lr of param_groups[{index}] is {float(rate):.6g}")
