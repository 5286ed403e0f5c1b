"""The branches of `torch.cond`: Dynamo traces them, which cannot look through what watches this trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

from monograph.capture.tensors.readings import Readings
from monograph.compat.modes import unrecorded, without_function_mode
from monograph.ir.probes import probes_go_to
from monograph.state.random import RandomState

Asides: TypeAlias = Callable[[], Iterable[Callable[[], AbstractContextManager[Any]]]]


def branches_by_dynamo(
    compile_branches: Callable[..., Any], *, readings: Readings, random: RandomState, asides: Asides
) -> Callable[..., Any]:
    """What takes the place of the function that calls Dynamo. `asides()` are what has to step aside for it."""

    def run(function: Any, args: tuple[Any, ...], *others: Any) -> Any:
        operands = [item for group in args if isinstance(group, (list, tuple)) for item in group]
        with unrecorded(), probes_go_to(None), readings.paused():
            for branch in filter(callable, args):
                branch(*operands)  # for the attributes that it reads
        touched = random.touched
        with ExitStack() as stack:
            for aside in asides():
                stack.enter_context(aside())
            stack.enter_context(without_function_mode())
            returned = compile_branches(function, args, *others)
        random.touched = touched  # Dynamo saves the random state and sets it back
        return returned

    return run
