"""Optimizers under the trace: they show fakes, their steps are watched, and what those change is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.code_watch import CodeWatch
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.optimizers.alike import StepByKinds
from monograph.capture.optimizers.asked_state import AskedState
from monograph.capture.optimizers.checks import (
    check_gradients,
    check_groups,
    check_not_stepped,
    reported_options,
    reported_parts,
)
from monograph.capture.optimizers.inputs import OptimizerInputs, state_with_fakes
from monograph.capture.optimizers.rules import StepRules
from monograph.capture.optimizers.scalers import begin_with_rate, no_new_state
from monograph.capture.optimizers.tracing import Declared, groups_with_fakes
from monograph.capture.optimizers.writes import OptimizerWrites, copied_groups
from monograph.capture.step.origins import OriginRecorder
from monograph.compat.amp import is_dynamic_scaler
from monograph.compat.fake_values import fake_values
from monograph.compat.modes import outside_of_function_modes
from monograph.compat.optimizers import lists_for_fakes
from monograph.errors import OptimizerError
from monograph.ir.call.sparse import is_sparse
from monograph.state.find import Owned, RegisteredOptimizer
from monograph.state.group_keys import LR_SCALE
from monograph.user_code.lines import Origin, step_place


class TracedOptimizers:
    """The optimizers of one trace, as the thread that captures sees them."""

    def __init__(
        self,
        begun: OptimizerInputs,
        owned: Owned,
        overlay: Overlay,
        rules: StepRules,
        recorder: OriginRecorder,
        watch: CodeWatch,
        *,
        with_values: bool,
    ) -> None:
        self._begun, self._inputs, self._overlay = begun, begun.inputs, overlay
        self._owned, self._rules, self._recorder, self._with_values = owned, rules, recorder, with_values
        self._watch = watch
        self._asked: dict[str, AskedState] = {}  # the state of each, as the trace sees it
        self._groups: dict[str, list[dict[str, Any]]] = {}  # param groups before the step
        self.steps: dict[str, int] = {}  # how often each one stepped
        self._places: dict[str, Origin] = {}  # the line of the first step of each
        self.stepped: set[int] = set()  # ids of the real parameters that were updated
        self.constant_counters: set[str] = set()  # of param groups: this trace takes them for constants
        self.empty_state: list[tuple[Any, Any]] = []  # optimizers, with owners of empty state

    # --- before the step ---------------------------------------------------------------------------------------------

    def take_over(self, registered: RegisteredOptimizer) -> None:
        """Let this thread see fakes in the optimizer, and watch its step."""
        optimizer, overlay, fake = registered.optimizer, self._overlay, self._inputs.fake
        state = self._asked[registered.name] = AskedState()
        shown = {
            fake(owner): state_with_fakes(entries, self._inputs, self._begun.counters)
            for owner, entries in self._begun.states[registered.name].items()
        }
        first = set(map(id, map(fake, self._begun.first(registered))))
        dict.update(state, {owner: entries for owner, entries in shown.items() if id(owner) not in first})
        state.begin({owner: entries for owner, entries in shown.items() if id(owner) in first}, fake)
        groups = groups_with_fakes(registered, fake, self._begun.symbols)
        for there, group in zip(optimizer.param_groups, groups, strict=True):
            overlay.show(there, group)
        overlay.show(optimizer.param_groups, groups)
        overlay.show(optimizer.state, state)
        overlay.enter(optimizer)
        self._groups[registered.name] = copied_groups(groups)
        optimizer.step = self._watched(registered, optimizer.step)  # type: ignore[method-assign]  # as this thread sees it

    def _watched(self, registered: RegisteredOptimizer, original: Callable[..., Any]) -> Callable[..., Any]:
        scaler = self._owned.scaler
        may_skip = is_dynamic_scaler(scaler) and scaler.is_enabled()

        def step(*args: Any, **kwargs: Any) -> Any:
            return self._rules.step(registered, lambda: run(*args, **kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._watch.off() as reporting, self._around_step(registered, may_skip=may_skip):
                its_own = partial(self._watch.call, reporting, original)
                if not (args or kwargs or self._with_values) and self._by_kinds(
                    registered, original, its_own
                ):
                    return None
                return its_own(*args, **kwargs)

        return step

    @contextmanager
    def _around_step(self, registered: RegisteredOptimizer, *, may_skip: bool) -> Iterator[None]:
        self._asked[registered.name].come()
        self._note_step(registered)
        with (
            self._recorder.phase("update", registered.name),
            fake_values(self._inputs.mode, infer_kernels=self._with_values),
            no_new_state(registered.optimizer) if may_skip else nullcontext(),
            reported_options(registered, self._groups[registered.name]),
            reported_parts(registered),
            lists_for_fakes(),
        ):
            if may_skip or any(LR_SCALE in group for group in registered.optimizer.param_groups):
                begin_with_rate(registered.optimizer)
            yield

    def _by_kinds(
        self, registered: RegisteredOptimizer, original: Callable[..., Any], its_own: Callable[[], Any]
    ) -> bool:
        moving, record = self._inputs.moving, self._recorder.repeated
        optimizer = registered.optimizer
        if not StepByKinds.fits(optimizer, original):
            return False
        return StepByKinds(optimizer, its_own, moving, record).run()

    # --- its step ----------------------------------------------------------------------------------------------------

    def _note_step(self, registered: RegisteredOptimizer) -> None:
        self.steps[registered.name] = self.steps.get(registered.name, 0) + 1
        self._places.setdefault(registered.name, step_place())
        for parameter in registered.parameters:
            if parameter.grad is not None:
                self.stepped.add(id(self._inputs.real_of(parameter)))
                self._check_gradient(registered, parameter)
                self._recorder.label_gradient(parameter)

    def _check_gradient(self, registered: RegisteredOptimizer, parameter: torch.Tensor) -> None:
        """First state is found by steps with dense gradients; what a sparse one makes of it may be something else."""
        real = self._inputs.real_of(parameter)
        declared = self._begun.declared[registered.name]
        if is_sparse(parameter.grad) and any(first.parameter is real for first in declared):
            raise OptimizerError(
                f"{registered.name} makes its first state for {self._begun.names.get(id(real))} from a sparse gradient",
                hint="use sparse=False in the embedding, or an optimizer without state of that kind: SGD without "
                "momentum, Adagrad",
            )

    def step_automatic(self) -> None:
        """After build(): the step of each optimizer that build() does not step itself."""
        for registered in self._owned.optimizers:
            check_groups(registered, self._groups[registered.name])
            if not registered.manual:
                check_not_stepped(registered, self._places)
                with self._rules.own_business():
                    check_gradients(registered, were_there=registered.name in self._rules.reached)
                registered.stepped.step()

    # --- after it ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The step is over: who looks for state from now on is not noted."""
        for state in self._asked.values():
            state.close()

    def collect_writes(self, state_outputs: list[StateOutput]) -> None:
        """What the steps have changed in state and in param groups."""
        begun = self._begun
        for registered in self._owned.optimizers:
            writes = OptimizerWrites(registered, self._inputs, state_outputs)
            with outside_of_function_modes():  # our looks at forms are none of the step
                writes.collect_state(begun.states[registered.name], begun.names, begun.counters)
            groups = map(self._overlay.there, registered.optimizer.param_groups)
            writes.collect_groups(self._groups[registered.name], list(groups), begun.symbols)
            self.constant_counters |= writes.counters
            self.empty_state += [(registered.optimizer, owner) for owner in writes.empty]

    def was_asked_for(self, name: str, owner: Any) -> bool:
        """True if the step has asked this optimizer for the state of an owner."""
        return name not in self._asked or self._asked[name].was_asked_for(self._inputs.fake(owner))

    def asked_early(self) -> list[str]:
        """The state that build() asks for before the optimizer makes it: the next step finds some."""
        return [
            f"the state of {name} that it asks for"
            for name, state in self._asked.items()
            if state.is_asked_early
        ]

    def made_for_good(self, registered: RegisteredOptimizer) -> dict[Any, Any]:
        """The first state that a step of this optimizer makes, by owner."""
        made: dict[Any, Any] = {
            first.parameter: first.entries
            for first in self._begun.declared[registered.name]
            if id(first.parameter) in self.stepped and self.was_asked_for(registered.name, first.parameter)
        }
        empty: dict[Any, Any] = {
            owner: {} for optimizer, owner in self.empty_state if optimizer is registered.optimizer
        }
        return made | empty

    def declared_in_vain(self) -> list[Declared]:
        """First state that the step has found, and that eager mode would not have made: there is no gradient."""
        return [
            first
            for name, found in self._begun.declared.items()
            for first in found
            if id(first.parameter) not in self.stepped and self.was_asked_for(name, first.parameter)
        ]

    def state_owners(self) -> dict[str, list[Any] | None]:
        """By optimizer the owners whose state decides what the step does; None for all that there are."""
        return {
            name: None if state.whole else [self._owner(item) for item in state.asked()]
            for name, state in self._asked.items()
        }

    def _owner(self, item: Any) -> Any:
        return self._inputs.real_of(item) if isinstance(item, torch.Tensor) else item
