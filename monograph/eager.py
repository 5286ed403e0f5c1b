"""The step of a graph in eager mode: the reference that a capture is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from monograph._torch import GRADIENT_GETTER, FunctionMode, replaced
from monograph.capture.rules import StepRules
from monograph.capture.state import HeldOptimizer, Holdings
from monograph.config import Settings


def eager_step(build: Callable[[], Any], holdings: Holdings, settings: Settings) -> Any:
    """Run build() and the updates as the graph does them. Gradients are None before, and stay as they come."""
    rules = StepRules(holdings, settings)
    with rules.hold(), _by_rules(holdings, rules):
        with rules.autocast():
            returned = build()
        for held in holdings.optimizers:
            if not held.manual:
                held.optimizer.step()
        rules.end()
    for average in holdings.averages:
        average.update()
    return returned


@contextmanager
def _by_rules(holdings: Holdings, rules: StepRules) -> Iterator[None]:
    """Steps of optimizers, and reading of gradients, go through the rules."""

    def see(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        returned = func(*args, **kwargs)
        if func == GRADIENT_GETTER and returned is not None:
            rules.gradient_was_read(args[0])
        return returned

    with ExitStack() as stack:
        for held in holdings.optimizers:
            step = partial(_step, rules, held, held.optimizer.step)
            stack.enter_context(replaced(held.optimizer, "step", step))
        if holdings.scaler is not None:
            stack.enter_context(FunctionMode(see))
        yield


def _step(
    rules: StepRules, held: HeldOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return rules.step(held, partial(original, *args, **kwargs))
