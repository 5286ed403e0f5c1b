"""Faults in what saves memory: updates as soon as they can be, results over arguments, and what is computed again."""

from __future__ import annotations

from tests.stress.mutations import Mutation

PLAN = ("plan/test_schedule.py", "plan/test_tail.py")

MEMORY: tuple[Mutation, ...] = (
    Mutation("plan", "returned.shows(own) or not returned.alone(index)", "not returned.alone(index)", ("plan",)),
    Mutation("plan", "early = max(new.name, lives[own].last_read, key=order.__getitem__)", "early = new.name", ("plan",)),
    Mutation("plan", "return source if max(readers, key=self._order.__getitem__) is op else None", "return source", ("plan/test_tail.py",), file="plan/tail", is_new=True),
    Mutation("plan", "            and all(reader in found or reader in exchanged or reader is output for reader in node.users)\n", "", ("plan/test_tail.py",), file="plan/tail", is_new=True),
    Mutation("plan", "if item.users.keys() - {new} or new.users.keys() != {graph.output_node()}:", "if False:", ("runtime/test_in_place.py",), file="plan/fused", is_new=True),
    Mutation("plan", "if found is not None and _is_apart(found, memory):", "if found is not None:", ("plan/test_tail.py",), file="plan/fused", is_new=True),
    Mutation("plan", "own == {old.name} and old.users.keys() <= {node, new}", "own == {old.name}", ("plan/test_tail.py",), file="plan/fused", is_new=True),
    Mutation("plan", "if not places or _may_negate(program):", "if not places:", ("plan/test_tail.py",), file="plan/tail", is_new=True),
    Mutation("plan", "if _is_same(item, kind, in_place)", "if True", ("plan/test_counterparts.py",), file="plan/counterparts", is_new=True),
    Mutation("plan", "            last_reader[node] = node", "            pass", ("plan", "passes/test_plan_and_passes.py")),
    Mutation("plan", "return described.dtype, len(described.shape), 0 in described.shape", "return None", ("plan",), is_new=True),
    Mutation("plan", "            if len(self._known) >= _CALLS:\n                self._known.clear()\n", "", ("plan",), is_new=True),
    Mutation("plan", "return max(self.nbytes, before + self._inside(node))", "return self.nbytes", ("plan",)),
    Mutation("plan", "return Shown(own, own | others if others else own)", "return Shown(own, own)", ("plan",)),
    Mutation("plan", "if plan.memory.peak_bytes < run.peak_bytes:", "if False:", ("plan",), was="if plan.memory.peak_bytes < replay.peak_bytes:"),
    Mutation("plan", "if port.role is not Role.STATE or old[0].role is Role.USER or old[0].path != port.path:", "if port.role is not Role.STATE or old[0].role is Role.USER:", ("plan/test_in_place.py", "plan/test_random_plans.py")),
    Mutation("plan", "return any(_size_indexed(item) == _size_indexed(node) for item in readers)", "return bool(readers)", PLAN, file="plan/updates/failing", is_new=True),
    Mutation("plan", " or origin(node).again:", ":", ("recompute/test_budgets.py",), file="plan/updates/failing", is_new=True),
    Mutation("plan", "read = [last_read.get(storage, -1) for name in written for storage in memory.possible[name]]", "read = [-1 for name in written]", ("plan", "runtime/test_in_place.py"), file="plan/updates/schedule", is_new=True),
    Mutation("plan", "lives[next(iter(memory.certain[source.name]))].last_read == node.name", "bool(lives)", PLAN, file="plan/overwrite", is_new=True),
    Mutation("plan", "        block.writer = node.name\n", "", PLAN, file="plan/simulate", is_new=True),
    Mutation("backends", "                torch._foreach_copy_(state, before)\n", "                pass\n", ("runtime/test_cut_short.py",), file="backends/python/two_parts", is_new=True),
    Mutation("plan", "        if source not in sources_of(op, self._memory, self._makers, self._sure):\n            return False\n", "", ("plan",), file="plan/updates/tail", is_new=True),
    Mutation("plan", "return all(shown.isdisjoint(self._memory.possible[item.name]) for item in self._returned)", "return True", PLAN, file="plan/updates/tail", is_new=True),
    Mutation("plan", "return is_pointwise(node.target) or all(map(_is_contiguous, given)) or _are_alike(node, given)", "return True", PLAN, file="plan/layouts", is_new=True),
    Mutation("passes", "        and len(grad.users) == 1\n", "", PLAN, file="passes/inductor/loss_in_blocks", is_new=True),
    Mutation("recompute", "        self.nbytes[list(self._on_the_way(held, over, ends))] = 0\n", "", ("recompute",), is_new=True),
    Mutation("recompute", "return self.schedules[-1].peak", "return self.schedules[0].peak", ("recompute",)),
    Mutation("recompute", "_beside(program))", "0)", ("recompute",)),
    Mutation("recompute", "        return program if is_same else loss_as_a_whole(found)\n", "        return program\n", ("recompute",)),
)  # fmt: skip
