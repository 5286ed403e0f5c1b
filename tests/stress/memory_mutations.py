"""Faults in what saves memory: updates as soon as they can be, results over arguments, and what is computed again."""

from __future__ import annotations

from tests.stress.mutations import Mutation

PLAN = ("plan/test_schedule.py", "plan/test_tail.py")

MEMORY: tuple[Mutation, ...] = (
    Mutation("plan", "return any(_size_indexed(item) == _size_indexed(node) for item in readers)", "return bool(readers)", PLAN, file="plan/updates/failing", is_new=True),
    Mutation("plan", " or origin(node).again:", ":", ("recompute/test_budgets.py",), file="plan/updates/failing", is_new=True),
    Mutation("plan", "read = [last_read.get(storage, -1) for name in written for storage in memory.possible[name]]", "read = [-1 for name in written]", ("plan", "runtime/test_in_place.py"), file="plan/updates/schedule", is_new=True),
    Mutation("plan", "last_read[next(iter(memory.certain[source.name]))] == places[node]", "places[node] >= 0", PLAN, file="plan/overwrite", is_new=True),
    Mutation("plan", "        view.place.block.writer = node.name\n", "", PLAN, file="plan/simulate", is_new=True),
    Mutation("backends", "                torch._foreach_copy_(state, before)\n", "                pass\n", ("runtime/test_cut_short.py",), file="backends/python/two_parts", is_new=True),
    Mutation("recompute", "return self.schedules[-1].peak", "return self.schedules[0].peak", ("recompute",)),
    Mutation("recompute", "_of_numbers(program))", "0)", ("recompute",)),
    Mutation("recompute", "        return program if is_same else found\n", "        return program\n", ("recompute",)),
)  # fmt: skip
