"""The pass `recompute`: a program that holds less, and computes again in backward what it has dropped."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from torch import fx

from monograph.errors import PlanError
from monograph.ir.meta import compute_nodes, computes, metas, origin, output_nodes, value
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.program import Program
from monograph.ir.text import bytes_text, bytes_texts
from monograph.passes.inductor.foreach_to_single import single_on_cpus
from monograph.passes.inductor.loss_in_blocks import loss_as_a_whole, loss_in_blocks
from monograph.passes.run import OnWhole, Pass
from monograph.passes.schedule_updates import schedule_updates
from monograph.plan.updates.schedule import light_ops
from monograph.recompute.cheap import COMPILED_SHARE, LEAST_BYTES, SHARE, cheapest, is_cheap
from monograph.recompute.cost import seconds_of
from monograph.recompute.problem import Problem, problem_of
from monograph.recompute.rewrite import rewritten
from monograph.recompute.schedule import Schedule, Scheduler
from monograph.recompute.solve import Curve, curve_of
from monograph.settings import MemoryBudget, Settings

COMPRESSED: Final = 1 / 3  # of the time of the step, which `compress_memory` may add


def recompute_passes(program: Program, settings: Settings) -> tuple[Pass, ...]:
    """The pass for these settings, if there is something to do for it in what was captured."""
    share = COMPRESSED if settings.compress_memory else None
    is_asked = settings.memory_budget is not None or share is not None
    if not is_asked and not settings.is_lean and not any(origin(node).region for node in program.ops()):
        return ()
    cheap = COMPILED_SHARE if settings.is_compiled else SHARE
    cheap = cheap if settings.is_lean else 0.0
    budget, is_compiled = settings.memory_budget, settings.is_compiled
    return (OnWhole(Recompute(budget, share, cheap, is_compiled=is_compiled)),)


def limit_of(program: Program, settings: Settings) -> int | None:
    """The bytes that a step may hold, if these settings have a budget; `program` is what nothing was dropped of yet."""
    budget = settings.memory_budget
    if budget is None or budget.share is None:
        return None if budget is None else budget.nbytes
    return budget.of(_Step(_as_it_runs(program, is_compiled=settings.is_compiled)).whole())


def share_text(budget: MemoryBudget, whole: int) -> str:
    """What a budget is a share of."""
    return f"{budget!r} is that share of {bytes_text(whole)}, which it holds with nothing computed again"


@dataclass(frozen=True)
class Recompute:
    """Drops values of forward and computes them again in backward: what is in regions of activation checkpointing, what costs next
    to nothing, and more where a budget of memory asks for it, in as little time as possible.

    With `free_share`, as much as that share of the predicted time of the step pays for, whatever the budget; with
    `cheap_share`, what is cheap up to that share of its work, where nothing else is asked or that is enough. What is computed again has the same
    bits: random numbers are drawn once and kept. Raises PlanError if the budget cannot be held.
    """

    budget: MemoryBudget | None = None
    free_share: float | None = None
    cheap_share: float = 0.0
    is_compiled: bool = False

    @property
    def __name__(self) -> str:
        """The name of the pass."""
        return "recompute"

    def __call__(self, program: Program) -> Program:
        """The program with copies of ops in backward."""
        step = _Step(_as_it_runs(program, is_compiled=self.is_compiled), self.cheap_share)
        whole = 0 if self.budget is None else step.whole()
        limit = None if self.budget is None else self.budget.of(whole)
        try:
            found = step.within(limit, self.free_share, _beside(program))
        except PlanError as error:
            if self.budget is None or self.budget.share is None:
                raise
            raise PlanError(f"{error.message}; {share_text(self.budget, whole)}", hint=error.hint) from None
        if limit is not None and (peak := peak_of(found)) > limit:
            held, planned = bytes_texts(peak, limit)
            raise PlanError(f"{held} are held where {planned} were planned")
        is_same = limit is None and sum(1 for _ in found.ops()) == sum(1 for _ in step.program.ops())
        return program if is_same else loss_as_a_whole(found)


def _as_it_runs(program: Program, *, is_compiled: bool) -> Program:
    """A program with each update as soon as its gradient is there."""
    single = single_on_cpus(program)
    return schedule_updates(single if is_compiled else loss_in_blocks(single))


def _beside(program: Program) -> int:
    """The bytes of new state that is not computed in place: counters, which are made before all else, and running statistics."""
    light = light_ops(program.graph)
    outputs = output_nodes(program.graph)
    results = {item for index, _ in program.updates() if isinstance(item := outputs[index], fx.Node)}
    apart = {item for item in results if item.target is operator.getitem and not _is_written(item)}
    own = sum(meta.extent for node in light | apart for meta in metas(value(node)))
    return own + sum(map(_beside, program.parts))


def _is_written(node: fx.Node) -> bool:
    """True for a result of an op that writes into what it is given, or of a subgraph, which is asked itself."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.target in IN_PLACE or node.op == "call_module"


def peak_of(program: Program) -> int:
    """The most bytes that a program holds at once, above those of its inputs."""
    return _Step(program).whole()


class _Step:
    """A program whose subgraphs come first: what they hold while they run is known then."""

    def __init__(self, program: Program, cheap_share: float = 0.0) -> None:
        self.program, self.cheap_share = program, cheap_share
        self.parts = {part.name: _Step(part, cheap_share) for part in program.parts}

    def whole(self) -> int:
        """The peak as it is."""
        return _held(problem_of(self.program, {name: part.whole() for name, part in self.parts.items()})).peak

    def within(self, limit: int | None, free_share: float | None, held: int = 0) -> Program:
        """The program that holds at most so many bytes, with the bytes `held` while it runs."""
        outside = self._outside() if self.parts else {}
        parts = {
            name: part.within(limit, free_share, held + outside.get(name, 0))
            for name, part in self.parts.items()
        }
        program = self.program.with_parts(tuple(parts.values()))
        inside = {name: peak_of(part) for name, part in parts.items()}
        problem = problem_of(program, inside)
        if free_share is None:
            units, chosen = problem.units, _held(problem, problem.forced)
            if self.cheap_share and chosen.peak >= LEAST_BYTES:
                cheap = problem_of(program, inside, is_cheap)
                units, chosen = cheap.units, cheapest(cheap, compute_nodes(program.graph), self.cheap_share)
            if limit is None or (self.cheap_share and chosen.peak + held <= limit):
                return rewritten(program, units, chosen.again)
        curve = curve_of(problem, seconds_of(unit.node for unit in problem.units), problem.forced)
        chosen = curve.schedules[0]
        if free_share is not None:
            chosen = curve.free(free_share * sum(seconds_of(compute_nodes(program.graph))))
        if limit is not None and chosen.peak + held > limit:
            chosen = _fitting(curve, limit, held)
        return rewritten(program, problem.units, chosen.again)

    def _outside(self) -> dict[str, int]:
        """The bytes that are held while each subgraph runs, besides its own."""
        problem, found = problem_of(self.program), dict[str, int]()
        held = _held(problem).held
        for position, node in enumerate(filter(computes, self.program.graph.nodes)):
            if node.op == "call_module":
                made = int(problem.nbytes[problem.births == position].sum())
                name = str(node.target)
                found[name] = max(found.get(name, 0), int(held[position]) - made)
        return found


def _held(problem: Problem, dropped: Collection[int] = ()) -> Schedule:
    return Scheduler(problem, [0.0] * len(problem.units)).schedule(dropped)


def _fitting(curve: Curve, limit: int, held: int) -> Schedule:
    found = curve.within(limit - held)
    if found is None:
        least = curve.least + held
        asked, possible = bytes_texts(limit, least)
        raise PlanError(
            f"the step cannot run in {asked} above its parameters, optimizer state and arguments: "
            f"it holds {possible} at least, with all that helps computed again",
            hint=f"config.set_memory_budget({least}), or a smaller batch",
        )
    return found
