"""Buffers of a wrapper are taken over before each forward for which eager DistributedDataParallel does so, and no other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from tests.distributed.test_data_parallel import (
    NetStep,
    as_it_is,
    check,
    collectives,
    pair,
    plain_body,
    sgd,
    state_of,
)
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same


def in_micro_batches(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Written by hand: all but the last without gradient synchronisation."""
    parts = x.chunk(4)
    for index, part in enumerate(parts):
        with model.no_sync() if index < len(parts) - 1 else nullcontext():
            loss = model(part).square().mean()
            (loss / len(parts)).backward()
    return loss


def by_hand(rank: int) -> None:
    """The first micro-batch alone takes buffers over: the others come after a forward in `no_sync()`."""
    graph = check(rank, in_micro_batches, rows=(8,))
    assert collectives(graph) == ["broadcast", "all_reduce"]
    assert len(graph.builds) == 1
    assert graph.verify(torch.randn(8, 4))


def first_alone(rank: int) -> None:
    """A step that ends in `no_sync()` leaves the next one without."""

    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        plain_body(model, x)
        with model.no_sync():
            return plain_body(model, 2 * x)

    graph = check(rank, body, steps=4)
    assert len(graph.builds) == 2
    assert "require_forward_param_sync" in str(graph.builds[1].reason)


def around(rank: int) -> None:
    """`no_sync()` around calls, every other one."""
    between(rank, lambda model, graph, x, step: unsynchronised(model, graph, x) if step % 3 else None)


def unsynchronised(model: Any, run: Callable[..., Any], x: torch.Tensor) -> None:
    with model.no_sync():
        run(x)


def evaluated(rank: int) -> None:
    """After a forward without gradients the next step takes nothing over, and the one after it does."""
    between(rank, lambda model, _graph, x, step: look(model, x) if step % 2 else None)


def look(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(x)
    model.train()
    return found


def between(rank: int, doing: Callable[..., Any], configure: Callable[[mg.Graph], None] = as_it_is) -> None:
    """Train the net both ways; `doing(model, run, x, step)` comes before each step."""
    first, second = pair(rank)
    optimizer, graph = sgd(first), NetStep(second, plain_body)
    configure(graph)

    def eager(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = plain_body(first, x)
        optimizer.step()
        return loss

    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(5):
        x = torch.randn(4, 4, generator=generator)
        doing(first, eager, x, step)
        doing(second, graph, x, step)
        assert_same(eager(x).detach(), graph(x).detach(), f"loss {step}")
        assert_same(state_of(first), state_of(second), f"step {step}")
        assert first.require_forward_param_sync == second.require_forward_param_sync


class Look(mg.Graph):
    """An evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(x)
        return found


def evaluated_by_graph(rank: int) -> None:
    """The same by a graph without optimizer."""
    first, second = pair(rank)
    other = Look(second)
    optimizer, graph = sgd(first), NetStep(second, plain_body)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(6):
        x = torch.randn(4, 4, generator=generator)
        if step % 3:
            second.eval()
            assert_same(look(first, x), other(x), f"outputs {step}")
            second.train()
        optimizer.zero_grad()
        loss = plain_body(first, x)
        optimizer.step()
        assert_same(loss.detach(), graph(x).detach(), f"loss {step}")
        assert_same(state_of(first), state_of(second), f"step {step}")


def without_buffers(rank: int) -> None:
    """Where there is nothing to take over, an evaluation between steps leads to no other build."""
    first, second = (DistributedDataParallel(nn.Linear(4, 3)) for _ in range(2))
    graph = NetStep(second, plain_body)
    optimizer = sgd(first)
    second.load_state_dict(first.state_dict())
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(4):
        x = torch.randn(4, 4, generator=generator)
        if step % 2:
            assert_same(look(first, x), look(second, x), f"outputs {step}")
        optimizer.zero_grad()
        loss = plain_body(first, x)
        optimizer.step()
        assert_same(loss.detach(), graph(x).detach(), f"loss {step}")
        assert_same(state_of(first), state_of(second), f"step {step}")
        assert first.require_forward_param_sync == second.require_forward_param_sync
    assert len(graph.builds) == 1, graph.explain()


def part_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    (loss / 2).backward()
    return loss.detach()


def accumulated_after_evaluation(rank: int) -> None:
    """A step of micro-batches after an evaluation takes nothing over, and the next one does."""
    first, second = pair(rank)
    optimizer, graph = sgd(first), NetStep(second, plain_body)
    graph.config.set_gradient_accumulation_steps(2)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(5):
        x = torch.randn(8, 4, generator=generator)
        if step % 2:
            look(first, x)
            look(second, x)
        optimizer.zero_grad()
        with first.no_sync():
            losses = [part_of(first, x[:4])]
        losses.append(part_of(first, x[4:]))
        optimizer.step()
        assert_same(torch.stack(losses), graph(x).detach(), f"losses {step}")
        assert_same(state_of(first), state_of(second), f"step {step}")


def twice_in_a_micro_batch(rank: int) -> None:
    """Refused: eager mode takes buffers over between the two forwards of the last micro-batch alone."""

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() + model(x + 1).mean()
        loss.backward()
        return loss

    _, model = pair(rank)
    graph = NetStep(model, body)
    graph.config.set_gradient_accumulation_steps(2)
    with pytest.raises(mg.DistributedError, match="build\\(\\) runs model twice in a micro-batch"):
        graph(torch.randn(8, 4))


QUICK: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(by_hand, first_alone, around, evaluated, evaluated_by_graph, accumulated_after_evaluation),
        *(without_buffers, twice_in_a_micro_batch),
    )
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_buffers_are_those_of_eager_mode(case: str, quick: Wrong) -> None:
    assert_right(case, quick)
