"""Random numbers that are known before a step: what torch's own generator is going to give.

A step draws in a fixed order. What an op draws depends on the form of its arguments, not on their values, so that the
draws before one that Python asks for can be repeated on empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import OpOverload, is_random
from monograph.state.random import SavedGenerators

# ops that take as much from a generator whatever their arguments hold
_BY_FORM = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_",
        "native_dropout", "uniform", "uniform_", "normal_", "normal_functional", "random", "random_", "exponential_",
    }
)  # fmt: skip


def draws(node: fx.Node) -> bool:
    """True for ops that draw from the generator of the process on the CPU."""
    if not is_random(node.target) or node.kwargs.get("generator") is not None:
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    return isinstance(first, torch.Tensor) and first.device.type == "cpu"


def can_be_repeated(node: fx.Node) -> bool:
    """True if what is drawn does not depend on values that the step computes."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket.__name__ in _BY_FORM


def with_draws_before(
    needed: Sequence[fx.Node], graph: fx.Graph, is_draw: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """`needed` with all draws before the last one among them, in order."""
    last = next((node for node in reversed(needed) if is_draw(node)), None)
    if last is None:
        return list(needed)
    kept, found = set(needed), []
    passed = False
    for node in graph.nodes:
        if node in kept or (not passed and is_draw(node)):
            found.append(node)
        passed |= node is last
    return found


def on_empty(node: fx.Node, make: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a draw that nobody looks at: tensors of the same form, which `make` allocates."""

    def fake(item: fx.Node) -> Any:
        value = item.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        return make(tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device=value.device)

    return fx.map_arg((node.args, node.kwargs), fake)


@contextmanager
def nothing_drawn(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Put the generator back where it was, if some of the nodes draw from it."""
    if not any(is_random(node.target) for node in nodes):
        yield
        return
    before = SavedGenerators([torch.default_generator])
    try:
        yield
    finally:
        before.restore()
