"""The step of a graph in eager mode: the reference that a capture is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from monograph._torch import GRADIENT_GETTER, GRADIENT_SETTER, FunctionMode, replaced
from monograph.capture.micro_batches import micro_call
from monograph.capture.rules import StepRules
from monograph.capture.signature import Call
from monograph.capture.state import HeldOptimizer, Holdings
from monograph.capture.transaction import RandomState
from monograph.config import Settings
from monograph.ir.tree import flatten, unflatten


def eager_step(build: Callable[..., Any], call: Call, holdings: Holdings, settings: Settings) -> Any:
    """Run build() and the updates as the graph does them. Gradients are None before, and stay as they come."""
    sums = _Sums(holdings)
    around_backward = sums.around_backward if settings.accumulation_steps > 1 else nullcontext
    rules = StepRules(holdings, settings, around_backward=around_backward)
    steps = settings.accumulation_steps
    watched = _Watched(rules, follow=steps > 1)
    looks = steps > 1 or holdings.scaler is not None
    with rules.hold(), watched.optimizers(holdings), FunctionMode(watched.see) if looks else nullcontext():
        returned = []
        for index in range(steps):
            sums.last = rules.complete = index == steps - 1
            micro = micro_call(call, steps, index) if steps > 1 else call
            args, kwargs = unflatten(call.tree, iter(micro.leaves))
            with rules.autocast():
                returned.append(build(*args, **kwargs))
            sums.end_micro_step()
        for held in holdings.optimizers:
            if not held.manual:
                held.optimizer.step()
        rules.end()
    for average in holdings.averages:
        average.update()
    return returned[0] if len(returned) == 1 else _packed(returned, watched)


class _Watched:
    """Steps of optimizers, and reading of gradients, go through the rules; what is made of gradients is known."""

    def __init__(self, rules: StepRules, follow: bool) -> None:
        self._rules, self._follow = rules, follow
        self.of_gradients: dict[int, torch.Tensor] = {}  # by id; only with `follow`

    @contextmanager
    def optimizers(self, holdings: Holdings) -> Iterator[None]:
        """Let `step()` go through the rules."""
        with ExitStack() as stack:
            for held in holdings.optimizers:
                step = partial(self._step, held, held.optimizer.step)
                stack.enter_context(replaced(held.optimizer, "step", step))
            yield

    def _step(self, held: HeldOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._rules.step(held, partial(original, *args, **kwargs))

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To be shown every torch function."""
        if func == GRADIENT_SETTER and args[1] is not None:
            self._rules.gradient_is_set(args[0])
        returned = func(*args, **kwargs)
        read = func == GRADIENT_GETTER and returned is not None
        if read:
            self._rules.gradient_was_read(args[0])
        if self._follow and (read or any(id(item) in self.of_gradients for item in _tensors((args, kwargs)))):
            self.of_gradients |= {id(item): item for item in _tensors(returned)}
        return returned


class _Sums:
    """Gradients over micro-batches. What build() does to them after backward() holds in the last one only."""

    def __init__(self, holdings: Holdings) -> None:
        self._parameters = [p for module in holdings.modules.values() for p in module.parameters()]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self.last = True
        self._random: RandomState | None = None  # when the last backward() had ended

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """backward() adds to the sums."""
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total
        yield
        self._sums = [parameter.grad for parameter in self._parameters]
        if not self.last:
            self._random = RandomState.now()
            self._random.touched = True
            for parameter in self._parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def end_micro_step(self) -> None:
        """Random numbers that were drawn for gradients of an incomplete sum count as not drawn."""
        if not self.last and self._random is not None:
            self._random.restore()


def _packed(returned: list[Any], watched: _Watched) -> Any:
    """Results of micro-batches as one: scalars stacked, batches joined; of the update there is one result."""
    columns: list[list[Any]] = []
    for item in returned:
        leaves: list[Any] = []
        tree = flatten(item, leaves)
        columns.append(leaves)
    rows = zip(*columns, strict=True)
    return unflatten(tree, iter([_joined(row, watched) for row in rows]))


def _joined(items: tuple[Any, ...], watched: _Watched) -> Any:
    last = items[-1]
    if not isinstance(last, torch.Tensor) or id(last) in watched.of_gradients:
        return last
    if all(item is last for item in items):
        return last
    return torch.cat(items) if last.dim() else torch.stack(items)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for entry in item:
            yield from _tensors(entry)
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))
