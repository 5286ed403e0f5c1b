"""The largest batch whose step fits into so much memory, found by plans: nothing runs, and no build is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from monograph.backends import LoweringRequest
from monograph.backends.aten import plan_to_run
from monograph.capture.effects.foreign_objects import check_repeatable
from monograph.capture.trace import capture
from monograph.compat.modes import outside_of_modes
from monograph.compiler import planned
from monograph.errors import CaptureError, DefinitionError, MonographError, PlanError, shown
from monograph.internals.internals import Arguments, Internals
from monograph.ir.call.dims import Dim, declared_sizes, dims_in, example_sizes, with_sizes
from monograph.ir.call.signature import Call, Spec
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.call.varying import declared
from monograph.ir.meta import TensorMeta, value
from monograph.ir.size_numbers import with_sizes_given
from monograph.ir.text import bytes_in, bytes_text
from monograph.passes.run import Stage
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import make_plan
from monograph.runnable import order_of
from monograph.sizes.place import size_places

_BATCH: Final = "batch"  # the name of the size that is looked for, unless it has one
_LARGEST: Final = 1 << 31


def largest_batch(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Any) -> int:
    """The largest batch whose step holds no more than `memory` bytes: state, arguments, and what the step makes."""
    try:
        limit = _limit(memory)
        graph.check_usable()
        arguments = _with_dim(graph.formed(args, kwargs))
        with graph.store.lock, graph.first_state.hidden(graph.registry.optimizers):
            return _Search(graph, arguments, limit).found()
    except MonographError as error:
        raise error.brief()


def _limit(memory: Any) -> int:
    limit: Any = bytes_in(memory) if isinstance(memory, str) else memory
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or not math.isfinite(limit) or limit <= 0:
        raise DefinitionError(
            f"max_batch(memory={shown(memory)}): that is no number of bytes",
            hint='max_batch(..., memory="16 GiB") or max_batch(..., memory=16 * 2**30)',
        )
    return int(limit)


def _with_dim(arguments: Arguments) -> Arguments:
    """The arguments as specs with a Dim for the batch: the one that they have, or else their equal first dimensions."""
    dims = dims_in(arguments)
    if len(dims) > 1:
        raise DefinitionError(
            f"max_batch() looks for one size, and the arguments have {len(dims)}: {', '.join(map(repr, dims))}",
            hint="give numbers for all but one",
        )
    if dims:
        return arguments
    leaves: list[Any] = []
    tree = flatten(arguments, leaves)
    batches = [leaf.shape[0] for leaf in leaves if _is_batch(leaf)]
    if not batches:
        raise DefinitionError(
            "max_batch() was given no tensor with a batch", hint="give tensors or mg.spec(...), as for a call"
        )
    dim = Dim(_BATCH, max=_LARGEST)
    found: Arguments = unflatten(
        tree,
        iter([
            Spec((dim, *leaf.shape[1:]), leaf.dtype, torch.device(leaf.device))
            if _is_batch(leaf) and leaf.shape[0] == batches[0]
            else leaf
            for leaf in leaves
        ]),
    )  # fmt: skip
    return found


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, Spec)) and len(leaf.shape) > 0


@dataclass
class _Search:
    """Plans a step at sizes. One capture for all sizes leads near to the answer, captures at two sizes prove it.

    What breaks the memory budget of the graph does not fit either.
    """

    graph: Internals
    arguments: Arguments
    limit: int

    def __post_init__(self) -> None:
        (self._dim,) = dims_in(self.arguments)
        self._unit = self.graph.settings.accumulation_steps  # a batch is split into so many
        self._known: dict[int, int] = {}
        self._over_budget: dict[int, PlanError] = {}  # by the same counts

    def found(self) -> int:
        """The answer."""
        least, most = -(-self._dim.min // self._unit), self._dim.max // self._unit
        near = None if self._for_all is None else self._last_fitting(self._by_sizes, least, most)
        if near is None or not self._is_proven(near, most):
            near = self._last_fitting(self._alone, least, most)
        if near is None:
            held = self._alone(least)
            if (error := self._over_budget.get(least)) is not None:
                raise PlanError(
                    f"the smallest batch, {least * self._unit}, does not fit into the memory budget: {error.message}",
                    hint=error.hint.partition(", or")[0],
                )
            raise PlanError(
                f"the smallest batch, {least * self._unit}, holds {bytes_text(held)}, and not {bytes_text(self.limit)}",
                hint=f"the least possible is memory={held}",
            )
        return near * self._unit

    def _is_proven(self, count: int, most: int) -> bool:
        above = count == most or self._alone(count + 1) > self.limit
        return above and self._alone(count) <= self.limit

    def _last_fitting(self, total: Callable[[int], int], least: int, most: int) -> int | None:
        """The largest number of units that fits; None if the least does not.

        What is held grows along a line nearly, which leads to the answer in few plans; each third one halves what is left.
        """
        fits, held, beyond, more = least, total(least), most + 1, 0
        if held > self.limit:
            return None
        tried, step = 0, 1
        while beyond - fits > 1:
            if not more:  # nothing is known that does not fit: go on where the line leads, and twice as far
                middle, step = min(fits + step, most), 2 * step
            elif tried % 3 == 2:
                middle = (fits + beyond) // 2
            else:
                middle = fits + (self.limit - held) * (beyond - fits) // (more - held)
                middle = min(max(middle + tried % 3, fits + 1), beyond - 1)
            now = total(middle)
            if now > self.limit:
                beyond, more = middle, now
            else:
                if not more and now > held:
                    step = max(step, (self.limit - now) * (middle - fits) // (now - held) + 1)
                fits, held = middle, now
            tried += 1
        return fits

    # --- plans -------------------------------------------------------------------------------------------------------

    @cached_property
    def _for_all(self) -> LoweringRequest | None:
        """The step for all sizes after its passes; None if it is one for a single size."""
        sizes = declared_sizes(self.arguments, self.graph.names)
        call = self._call(example_sizes(self.arguments, self._unit))
        form = declared(call, sizes)
        by_names = None if form is None else form.of(call)
        if by_names is None:
            return None
        try:
            return self._order(by_names, for_all=True)
        except (CaptureError, PlanError):  # of the budget, at sizes that nobody asks for
            return None

    def _by_sizes(self, count: int) -> int:
        assert self._for_all is not None
        program = self._for_all.plan.program
        described = map(value, program.graph.find_nodes(op="placeholder"))
        places = size_places(item.shape if isinstance(item, TensorMeta) else () for item in described)
        sizes = {name: count * self._unit // place.parts for name, place in places.items()}
        plan = make_plan(with_sizes_given(program, sizes))
        return _total(plan_to_run(replace(self._for_all, plan=plan)).memory)

    def _alone(self, count: int) -> int:
        """The bytes of the step that is captured at this size; more than are asked for if it breaks the memory budget."""
        if count not in self._known:
            try:
                order = self._order(self._call({self._dim.name: count * self._unit}))
                self._known[count] = _total(plan_to_run(order).memory)
            except PlanError as error:
                if self.graph.settings.memory_budget is None:
                    raise
                self._known[count], self._over_budget[count] = self.limit + 1, error
        return self._known[count]

    def _call(self, sizes: dict[str, int]) -> Call:
        return self.graph.read(*with_sizes(self.arguments, sizes))

    def _order(self, call: Call, *, for_all: bool = False) -> LoweringRequest:
        """What a backend would get of the step; with `for_all` a CaptureError if it is one for a single size."""
        settings = self.graph.settings.plain()
        with self.graph.in_build(), outside_of_modes():
            captured = capture(self.graph.request(call))
        try:
            check_repeatable([captured.effects], "max_batch() captures the step at several sizes")
            if for_all and captured.fixed:
                raise CaptureError("the step fixes a size")
            plan = planned(Stage("capture", captured.program, 0.0), settings)[1]
            shared = captured.guards.shared_with_arguments
            return order_of(captured.for_good(), plan, settings, shared=shared)
        finally:
            captured.undo()


def _total(memory: MemoryPlan) -> int:
    return memory.state_bytes + memory.argument_bytes + memory.peak_bytes
