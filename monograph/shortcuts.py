"""Graphs without a class: from a function, or from model, loss and optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph.capture.signature import check_runs_at_once
from monograph.errors import DefinitionError
from monograph.graph import Graph


class TrainGraph(Graph):
    """The usual training step: `loss_fn(model(*inputs), target)`, backward, optimizer, scheduler."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        lr_sch: LRScheduler | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.add_optimizer(optimizer, lr_sch=lr_sch)

    def build(self, *batch: Any) -> Any:
        """The last argument is the target, the others are the model's inputs."""
        *inputs, target = batch
        loss = self.loss_fn(self.model(*inputs), target)
        loss.backward()
        return loss


def train_graph(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    lr_sch: LRScheduler | None = None,
) -> TrainGraph:
    """A training Graph from the usual three; call it with `(*inputs, target)`, it returns the loss.

    >>> model = nn.Linear(3, 2)
    >>> step = train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)).shape
    torch.Size([])
    """
    return TrainGraph(model, loss_fn, optimizer, lr_sch)


def trace(function: Callable[..., Any]) -> Graph:
    """A Graph from a function; usable as a decorator.

    Modules that the function reaches by name are held by the graph; optimizers likewise, and the function steps
    them itself. Everything else it reads from outside is a constant.

    >>> double = trace(lambda x: x * 2)
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    return traced(function, Graph)


def traced(function: Callable[..., Any], base: type[Graph]) -> Graph:
    """`trace` with another class of Graph."""
    if not callable(function):
        raise DefinitionError(f"trace() takes a function, got a {type(function).__name__}")
    check_runs_at_once(function, getattr(function, "__name__", "the function of trace()"))

    def build(self: Graph, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = _parameters(function)
    free = max((parameter.name for parameter in parameters), key=len, default="") + "_"  # which no other has
    own = inspect.Parameter(free, inspect.Parameter.POSITIONAL_ONLY)
    build.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    graph: Graph = type(f"{name}_graph", (base,), {"build": build, "__doc__": function.__doc__})()
    for label, held in _reached(function):
        if isinstance(held, nn.Module):
            setattr(graph, label, held)
        elif isinstance(held, Optimizer):
            graph.add_optimizer(held, manual=True)
    return graph


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # functions of torch that are made in C do not tell
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return [inspect.Parameter(name, kind) for name, kind in kinds.items()]


def _reached(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function reaches by name: closures, globals, and the object it is bound to."""
    if isinstance(function, nn.Module):
        yield "module", function
        return
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield "owner", owner
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        found = inspect.getclosurevars(plain)
        yield from found.globals.items()
        yield from found.nonlocals.items()
