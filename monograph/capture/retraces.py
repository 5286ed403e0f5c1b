"""Traces of one step: the first, and others where that shows that more has to be an input, or less."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.effects.python_objects.counters import Counters, Uncounted
from monograph.capture.effects.python_objects.number_places import Place, unique
from monograph.capture.numbers.same_ops import first_difference
from monograph.capture.numbers.taken import ValuesTaken
from monograph.capture.optimizers.declared_state import declare_state
from monograph.capture.optimizers.tracing import Declared
from monograph.capture.step.observer import SILENT
from monograph.capture.step.replaced_functions import OpChoices
from monograph.capture.step.request import Request
from monograph.capture.step.traced_step import TracedStep
from monograph.capture.tensors.recurrent_layers import joins_gradients
from monograph.distributed.zero import parts_of_whole
from monograph.errors import CaptureError, MonographError, first_line
from monograph.state.snapshot import Snapshot
from monograph.user_code.lines import Origin, user_place_of

_LOGGER = logging.getLogger("monograph")
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recording:
    """A step with the graph that it recorded."""

    step: TracedStep
    graph: fx.GraphModule
    why_still: str = ""  # why numbers that move are constants in it
    why_plain: str = ""  # and why numbers in Python objects are that have changed


class Retraces:
    """Traces a step until all is an input that has to be one. Each trace begins with the same."""

    def __init__(
        self, request: Request, modules: Mapping[str, nn.Module], snapshot: Snapshot, *, with_values: bool
    ) -> None:
        self._request, self._modules = request, modules
        self._snapshot, self._with_values = snapshot, with_values
        self._declared: dict[str, list[Declared]] = {}  # first state, by optimizer
        self._choices = OpChoices()

    def record(self) -> Recording:
        """The last trace. What it has changed is still there."""
        parts = parts_of_whole(self._request.owned, self._request.settings)
        self._declared = {
            registered.name: declare_state(registered, parts) for registered in self._request.owned.optimizers
        }
        with self._snapshot.seeding_noted():
            last = self._with_sums_in_place(self._with_single_steps(self._with_ints()))
            last = self._without_vain_state(last)
            last = self._with_group_counters(last)
            return self._with_numbers(last)

    def _first(self, still: frozenset[str] = _NONE) -> TracedStep:
        return TracedStep(
            self._request, self._modules, self._with_values, self._snapshot, self._declared, still
        )

    def _with_ints(self) -> Recording:
        """The first trace, in which ints among the arguments move only if it does what it does with plain ones.

        Code could ask whether a number is a plain one without taking its value. Raises ValuesTaken.
        """
        call = self._request.call
        ints = {path: leaf for leaf, path in enumerate(call.paths()) if call.keys[leaf] is int}
        if not ints:
            return self._recorded(self._first())
        plain = self._first(frozenset(ints))
        graph = plain.record()
        last = self._recorded(self._again(plain, _NONE))
        if not last.step.still and (other := first_difference(graph.graph, last.graph.graph)):
            _LOGGER.debug("%s: ints are constants: %s", self._request.name, other)
            raise ValuesTaken(dict.fromkeys(ints.values(), Origin()))
        return last

    def _again(
        self,
        before: TracedStep,
        still: frozenset[str],
        counters: frozenset[str] = _NONE,
        numbers: Counters | None = None,
    ) -> TracedStep:
        """The same step, to be traced once more."""
        _check_undone(before.effects)
        self._snapshot.roll_back()
        return TracedStep(
            replace(self._request, observer=SILENT),  # a retrace is logged once
            self._modules,
            self._with_values,
            self._snapshot,
            self._declared,
            still,
            known_counters=counters,
            numbers=numbers or Counters(),
            choices=self._choices,
        )

    def _recorded(self, step: TracedStep) -> Recording:
        """The step with what it recorded. Where code takes no number that moves, such numbers are constants."""
        try:
            return Recording(step, step.record())
        except (TypeError, AttributeError) as error:
            if isinstance(error, MonographError):
                raise
            choices, why = step.inputs.numbers(), first_line(error)
            if not choices:
                raise
        for still in choices[:-1]:
            step = self._again(step, still)
            try:
                return Recording(step, step.record(), why)
            except (TypeError, AttributeError):
                continue
        step = self._again(step, choices[-1])
        return Recording(step, step.record(), why)  # an error now is one of plain numbers too

    def _with_single_steps(self, last: Recording) -> Recording:
        """Recurrent layers step by step, as torch has them, where gradients would be added in another order."""
        if not (last.step.functions.keeps_layers and joins_gradients(last.graph.graph)):
            return last
        self._choices = replace(self._choices, keeps_layers=False)
        return self._recorded(self._again(last.step, last.step.still))

    def _with_sums_in_place(self, last: Recording) -> Recording:
        """Gradients added in place as eager mode does it, where that decides how they are laid out."""
        sums = last.step.functions.sums.in_place(last.graph.graph, last.step.makers)
        if not sums:
            return last
        self._choices = replace(self._choices, sums_in_place=sums)
        return self._recorded(self._again(last.step, last.step.still))

    def _without_vain_state(self, last: Recording) -> Recording:
        """First state that eager mode would not have made is taken away again."""
        vain = set(map(id, last.step.optimizers.declared_in_vain()))
        if not vain:
            return last
        self._declared = {
            name: [item for item in found if id(item) not in vain] for name, found in self._declared.items()
        }
        step = self._again(last.step, last.step.still)
        return replace(last, step=step, graph=step.record())

    def _with_group_counters(self, last: Recording) -> Recording:
        """A constant of one trace that the step moves is an input of the next."""
        while last.step.optimizers.constant_counters:
            step = self._again(
                last.step, last.step.still, last.step.known_counters | last.step.optimizers.constant_counters
            )
            last = replace(last, step=step, graph=step.record())
        return last

    def _with_numbers(self, last: Recording) -> Recording:
        """The step once more, with numbers that move where plain ones do not stay; the same if that cannot be.

        Those are the numbers that it changes itself, and those that have changed since an earlier build was made.
        """
        step = last.step
        if step.effects.lost or step.request.settings.accumulation_steps > 1:
            lost = next(iter(step.effects.lost), "")
            return replace(last, why_plain=f"build() changes {lost}" if lost else "gradients are accumulated")
        changed = unique(step.objects.changed(step.reads, step.effects))
        with_outside = unique([*changed, *step.objects.moved(step.request.moved)])
        trials = [with_outside, changed] if len(with_outside) > len(changed) else [changed]
        why = ""
        for places in filter(None, trials):
            found = self._counted(last, places, as_plain=places is not changed)
            others = [place for place in places if place.label != found]  # but for the one at fault
            if isinstance(found, str) and places is not changed and changed != others != list(places):
                why, places = why or found, others
                found = self._counted(last, others, as_plain=True)
            if isinstance(found, Recording):
                return replace(found, why_plain=why)
            why = why or found
        if not any(trials):
            return last
        step = self._again(step, step.still, step.known_counters)
        return replace(last, step=step, graph=step.record(), why_plain=why)

    def _counted(self, last: Recording, places: Sequence[Place], *, as_plain: bool) -> Recording | str:
        """The step with numbers that move in these places; why not, if they are used in a way that cannot be followed.

        With `as_plain` it must do what it does with the plain numbers that are there now.
        """
        step = last.step
        numbers = Counters(places)
        touched = step.snapshot.random.touched
        try:
            counted = self._again(step, step.still, step.known_counters, numbers)
            graph = counted.record()
            numbers.check(counted.reach, counted.effects, step.effects, counted.objects.overwritten)
            counted.side_effects.values.check_put(counted.reads)
            numbers.remove()
            if left := not_carried(counted, counted.snapshot.changed_containers()):
                raise Uncounted(left[0])
            if as_plain and (other := first_difference(last.graph.graph, graph.graph)):
                raise Uncounted(other)
            return replace(last, step=counted, graph=graph)
        except Exception as error:  # what is wrong with the step itself, the next trace reports
            _LOGGER.debug("%s: numbers that change are constants: %s", step.request.name, first_line(error))
            step.snapshot.random.touched = touched
            if isinstance(error, Uncounted):
                return str(error)
            where = user_place_of(error)
            return f"{where}: {first_line(error)}" if where.file else first_line(error)
        finally:
            numbers.remove()


def not_carried(step: TracedStep, changed: Iterable[str]) -> list[str]:
    """Of the containers that a trace has changed those that no replay changes."""
    return [path for path in changed if not {path, f"graph.{path}"} & step.side_effects.tensors.carried]


def _check_undone(effects: Effects) -> None:
    """A step that has to be traced twice must begin both times with the same."""
    if effects.lost:
        raise CaptureError(
            f"build() changes {effects.lost[0]}, which cannot be put back, and has to be traced twice",
            hint="draw from it outside of build(), and pass what was drawn as an argument",
        )
