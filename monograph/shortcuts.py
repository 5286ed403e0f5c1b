"""Graphs without a class: from a function, or from model, loss and optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph import inspected
from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.code_names import names_of
from monograph.compat.modules import takes_what_forward_takes
from monograph.errors import DefinitionError, SignatureError
from monograph.graph import Graph
from monograph.internals.internals import internals_of
from monograph.internals.registry import one_scheduler
from monograph.ir.call.parameters import check_runs_at_once
from monograph.user_code.files import is_installed_file, is_user_file

if TYPE_CHECKING:
    from monograph.inspect.pages.modules import StepSummary


class TrainGraph(Graph, last="target"):
    """The usual training step: `loss_fn(model(*inputs), target)`, backward, optimizer, scheduler.

    With `outputs` it returns the loss and `outputs(model(*inputs), target)`, of the predictions that the loss is of.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        lr_sch: LRScheduler | None = None,
        *,
        lr_scheduler: LRScheduler | None = None,
        outputs: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        _check_parts(model, loss_fn, optimizer)
        if outputs is not None and not callable(outputs):
            raise DefinitionError(
                f"outputs is a {type(outputs).__name__}; train_graph() takes a function of the predictions and the target",
                hint="for example outputs=lambda predictions, target: (predictions.argmax(1) == target).float().mean()",
            )
        self.model = model
        self.loss_fn = loss_fn
        self.outputs = outputs
        self.add_optimizer(optimizer, lr_sch=lr_sch, lr_scheduler=lr_scheduler)

    def build(self, *batch: Any) -> Any:
        """The last argument is the target, the others are the model's inputs."""
        if not batch:
            raise SignatureError(
                "a step of train_graph() needs the model's inputs, and the target as the last argument",
                hint="pass a batch, as to the step itself",
            )
        *inputs, target = batch
        predictions = self.model(*inputs)
        loss = self.loss_fn(predictions, target)
        loss.backward()
        return loss if self.outputs is None else (loss, self.outputs(predictions, target))


def _check_parts(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Raise DefinitionError for what is at another place than train_graph() expects it, or is a class."""
    wrong = ""
    hint = "the order is mg.train_graph(model, loss_fn, optimizer)"
    if isinstance(model, type) or not callable(model):
        wrong = f"model is {_named(model)}; it takes an nn.Module"
    elif isinstance(loss_fn, type) or not callable(loss_fn):
        wrong = f"loss_fn is {_named(loss_fn)}; it takes a function of the predictions and the target"
        if isinstance(loss_fn, type):
            hint = f"make one: {loss_fn.__name__}(); {hint}"
        elif isinstance(loss_fn, str):
            hint = f"for example torch.nn.functional.cross_entropy or nn.CrossEntropyLoss(); {hint}"
    elif isinstance(optimizer, LRScheduler):
        wrong = f"optimizer is {_named(optimizer)}, a scheduler"
        hint = "pass the optimizer, and the scheduler after it: mg.train_graph(model, loss_fn, optimizer, lr_sch=scheduler)"
    elif isinstance(optimizer, (type, nn.Module, str, list, tuple)) or optimizer is None:
        wrong = f"optimizer is {_named(optimizer)}; it takes a torch.optim.Optimizer"
        if isinstance(optimizer, type):
            hint = f"make one: {optimizer.__name__}(model.parameters()); {hint}"
        elif isinstance(optimizer, (list, tuple)):
            hint = "for several optimizers write a Graph, and call add_optimizer() for each"
    if wrong:
        raise DefinitionError(f"train_graph(): {wrong}", hint=hint)


def _named(item: Any) -> str:
    if isinstance(item, (str, type(None))):
        return repr(item)
    if isinstance(item, type):
        return f"the class {item.__name__}"
    return f"of type {type(item).__name__}"


def train_graph(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    lr_sch: LRScheduler | None = None,
    *,
    lr_scheduler: LRScheduler | None = None,
    outputs: Callable[..., Any] | None = None,
) -> TrainGraph:
    """A training Graph from the usual three; call it with `(*inputs, target)` or `(*inputs, target=y)`, it returns the loss.

    With `outputs`, a function of the predictions and the target, it returns the loss and what that gives, such as the
    accuracy. The scheduler may be given as `lr_scheduler=`.

    >>> model = nn.Linear(3, 2)
    >>> step = train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)).shape
    torch.Size([])

    >>> def accuracy(predictions, target):
    ...     return (predictions.argmax(1) == target).float().mean()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = train_graph(model, nn.CrossEntropyLoss(), optimizer, outputs=accuracy)
    >>> loss, right = step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    >>> right.shape
    torch.Size([])
    """
    one_scheduler("train_graph()", lr_sch, lr_scheduler)
    return TrainGraph(model, loss_fn, optimizer, lr_sch, lr_scheduler=lr_scheduler, outputs=outputs)


def summary(graph: Graph, *args: Any, depth: int | None = None, **kwargs: Any) -> StepSummary:
    """The modules of a graph as a tree, with shapes, parameters, FLOPs and memory: `graph.summary(*args)`.

    Raises DefinitionError for a model without a graph.

    >>> step = trace(nn.Linear(3, 2))
    >>> summary(step, torch.zeros(4, 3)).flops
    {'forward': 48}
    """
    if not isinstance(graph, Graph):
        raise DefinitionError(
            f"summary() is of a Graph, got a {type(graph).__name__}",
            hint="for a model alone: mg.summary(mg.trace(model), mg.spec((64, 3, 32, 32)))",
        )
    return inspected.summary(graph, *args, depth=depth, **kwargs)


def trace(function: Callable[..., Any]) -> Graph:
    """A Graph from a function; usable as a decorator.

    Modules that the function reaches by name are registered with the graph; optimizers likewise, and the function
    steps them itself. It runs as it is written: it clears gradients by zero_grad(), or they add up from call to call.
    What else it reads from globals and closures is guarded.

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
    internals_of(graph).registry.as_written = True
    for label, held in _reached(function):
        if isinstance(held, nn.Module):
            setattr(graph, label, held)
        elif isinstance(held, Optimizer):
            graph.add_optimizer(held, manual=True)
    return graph


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a function; for a module those of its `forward`, if no hook stands before it."""
    if isinstance(function, nn.Module) and takes_what_forward_takes(function):
        function = function.forward
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # functions of torch that are made in C do not say
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return [inspect.Parameter(name, kind) for name, kind in kinds.items()]


def _reached(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The modules and optimizers that a function reaches by name, each once, with what to call them."""
    if isinstance(function, nn.Module):
        yield "module", function
        return
    yield from _Reached(function).found.items()


class _Reached:
    """Follows names: closures and globals, functions of the user that it comes to, and the attributes of objects that are
    spelled in any code on the way."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.found: dict[str, Any] = {}
        self._objects: list[tuple[str, Any]] = []
        self._names: set[str] = set()
        self._seen: set[int] = set()
        self._visit("owner", function, first=True)
        known = None
        while known != (known := (len(self._seen), len(self._names))):
            for label, item in list(self._objects):
                for name in sorted(self._names):
                    held = vars(item).get(name, getattr(type(item), name, None))
                    self._visit(f"{label}_{name}", held)

    def _visit(self, label: str, item: Any, *, first: bool = False) -> None:
        if id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, (nn.Module, Optimizer)):
            while label in self.found:
                label += "_"
            self.found[label] = item
        elif isinstance(item, partial):
            for part in (item.func, *item.args, *item.keywords.values()):
                self._visit(label, part, first=first)
        elif inspect.isroutine(item):
            self._visit(label, getattr(item, "__self__", None))
            self._follow(inspect.unwrap(getattr(item, "__func__", item)), first=first)
        elif not isinstance(item, type) and hasattr(item, "__dict__") and _is_users(type(item)):
            self._objects.append((label, item))

    def _follow(self, function: Callable[..., Any], *, first: bool) -> None:
        if not inspect.isfunction(function) or not (
            first or _is_written_by_user(function.__code__.co_filename)
        ):
            return
        codes = [function.__code__]
        for code in codes:  # it grows: functions inside of the function
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            names = names_of(code)
            self._names |= names.attributes
            for name in sorted(names.globals & function.__globals__.keys()):
                self._visit(name, function.__globals__[name])
        for name, held in closure_of(function).items():
            self._visit(name, held)


def _is_users(kind: type) -> bool:
    return _is_written_by_user(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _is_written_by_user(filename: str) -> bool:
    return is_user_file(filename) and not is_installed_file(filename)
