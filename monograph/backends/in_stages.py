"""The `inductor` backend of a pipeline: the parts that each micro-batch calls are compiled, each as a unit.

The rest is as on `exact`: what is sent and received between them op by op, and the update, which runs once, in loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from monograph.backends import exact, inductor
from monograph.backends.aten import in_single_ops
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.compat.distributed.ops import transfers
from monograph.ir.text import count_text
from monograph.plan.plan import make_plan
from monograph.runtime.runner import Runner


def lower(order: LoweringRequest) -> LoweredProgram:
    """Compile a plan: all of it, or the parts of a pipeline. Raises BackendError, naming the op and the user's line."""
    if not any(transfers(node.target) for node in order.plan.program.ops()):
        return inductor.lower(order)
    parts = {
        part.name: inductor.lower(replace(order, plan=make_plan(part), in_place=(), copied_inputs=None))
        for part in in_single_ops(order.plan).program.parts
    }
    rest = exact.lower(order, {name: _function(part.runner) for name, part in parts.items()})
    said = f"inductor: {count_text(len(parts), 'part')} of the pipeline compiled, what is sent runs op by op"
    return replace(
        rest,
        backend="inductor",
        notes=(said, *dict.fromkeys(note for part in parts.values() for note in part.notes), *rest.notes),
        choices=(*rest.choices, *(choice for part in parts.values() for choice in part.choices)),
    )


def _function(runner: Runner) -> Callable[..., tuple[Any, ...]]:
    """What the text of a step calls."""

    def run(*given: Any) -> tuple[Any, ...]:
        inputs = list(given) if runner.prepare is None else runner.prepare(list(given))
        try:
            results = runner.run(inputs.copy())
        except Exception as error:
            raise (None if runner.failure is None else runner.failure(given)) or error from None
        return tuple(results if runner.finish is None else runner.finish(results, inputs))

    return run
