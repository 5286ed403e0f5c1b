"""Functionalisation in both ways: the program that is copied op by op is the one of a second trace, node by node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
from torch import fx

from monograph.capture import trace
from monograph.capture.tensors.functional.functionalise import Functional
from monograph.capture.tensors.functional.writes import rewriting
from monograph.ir.meta import labels, origin


@dataclass
class Seen:
    """How many steps were compared, and how many ops of them had to be traced again."""

    steps: int = 0
    ops: int = 0
    replayed: int = 0
    of: list[str] = field(default_factory=list)  # what was replayed


@contextmanager
def compared_ways() -> Iterator[Seen]:
    """Inside, each captured step is made pure in both ways, and the programs are compared."""
    usual, seen = trace.functionalise, Seen()

    def functionalise(
        module: fx.GraphModule, *args: Any, replayed: bool = False, **kwargs: Any
    ) -> Functional:
        plan = rewriting(module.graph)
        made = usual(module, *args, replayed=replayed, **kwargs)
        again = usual(module, *args, replayed=True, **kwargs)
        assert made.num_results == again.num_results
        assert made.changed == again.changed
        assert made.shown.keys() == again.shown.keys()
        assert not (found := first_difference(lines(made.module.graph), lines(again.module.graph))), found
        seen.steps += 1
        seen.ops += len(module.graph.nodes)
        seen.replayed += len(plan.replayed)
        seen.of += [str(node.target) for node in plan.replayed]
        return made

    with mock.patch.object(trace, "functionalise", functionalise):
        yield seen


def first_difference(one: list[Any], other: list[Any]) -> str:
    """The first lines that are not the same, and nothing where all are."""
    pairs = zip_longest(one, other)
    return next((f"copied: {first}\nreplayed: {second}" for first, second in pairs if first != second), "")


def lines(graph: fx.Graph) -> list[Any]:
    """What each node of a graph is, in order."""
    return [
        (
            node.op,
            node.name,
            node.target if node.op not in ("placeholder", "get_attr") else "",
            repr(fx.map_arg((node.args, node.kwargs), lambda item: item.name)),
            form(node.meta.get("val")),
            origin(node),
            labels(node),
            node.meta.get("grad_mode"),
        )
        for node in graph.nodes
    ]


def form(value: Any) -> Any:
    """What is known of a value without its numbers."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.layout, value.dtype, str(value.shape)
        steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]
        place = str(value.shape), str(steps)
        return (value.dtype, value.device, place, value.is_conj(), value.is_neg(), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [form(item) for item in value]
    return type(value).__name__
