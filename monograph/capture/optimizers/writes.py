"""The side effects of an optimizer's step: new state, changed param groups, numbers that count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from monograph.capture.effects.state_outputs import StateOutput, fits
from monograph.capture.guards.sources.values import is_plain
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import OptimizerError
from monograph.ir.graph_signature import Assign, Copy, OptimizerEntries
from monograph.state.find import RegisteredOptimizer

STEP_SCHEDULER = (
    "step the scheduler after the call, or give it to add_optimizer(optimizer, manual=True, lr_sch=scheduler), so that the graph "
    "steps it after each call"
)
_NOTHING = object()


@dataclass
class OptimizerWrites:
    """Collects what one optimizer's step changed in the trace, before the optimizer gets its own state back."""

    held: RegisteredOptimizer
    inputs: Inputs
    state_outputs: list[StateOutput] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)  # owners whose state was asked for and stayed empty
    counters: set[str] = field(
        default_factory=set
    )  # whole numbers in param groups that this trace made constants

    def collect_state(
        self, before: Mapping[Any, Any], names: Mapping[int, str], numbers: Mapping[int, Mapping[Any, Any]]
    ) -> None:
        """New, re-assigned and counted entries. `numbers` has the symbols of a container's numbers by its id."""
        after = self.held.optimizer.state
        for owner in before:
            if self.inputs.fake(owner) not in after:
                raise self._error(f"removes the state of {names.get(id(owner), owner)}")
        for fake, entries in after.items():
            owner = self.inputs.real_of(fake) if isinstance(fake, torch.Tensor) else fake
            path = f"{self.held.name}/{names.get(id(owner), owner if isinstance(owner, str) else '')}"
            if not isinstance(entries, dict):
                raise self._error(f"keeps a {type(entries).__name__} as {path}", "keep entries in a dict")
            if owner is not None and owner not in before and not entries:
                self.empty.append(owner)
            target = OptimizerEntries(self.held.optimizer, owner)
            self._collect(path, entries, before.get(owner, {}), target, numbers)

    def _collect(
        self, path: str, entries: Any, before: Any, target: Any, numbers: Mapping[int, Mapping[Any, Any]]
    ) -> None:
        old_items = dict(_items(before))
        if lost := old_items.keys() - dict(_items(entries)).keys():
            raise self._error(f"removes {path}/{lost.pop()}")
        for key, value in _items(entries):
            old, where = old_items.get(key, _NOTHING), f"{path}/{key}"
            if isinstance(value, (dict, list)) and type(value) is type(old):
                self._collect(where, value, old, old, numbers)
            elif isinstance(before, list) and old is _NOTHING:
                raise self._error(f"makes the list {path} longer")
            else:
                self._collect_entry(
                    where, value, old, Assign(target, key), numbers.get(id(before), {}).get(key)
                )

    def _collect_entry(self, path: str, value: Any, old: Any, assign: Assign, symbol: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(old, torch.Tensor):
                self.state_outputs.append(StateOutput(value, assign, path))
            elif fits(value, old):
                if self.inputs.by_real.get(id(old)) is not value:
                    self.state_outputs.append(StateOutput(value, Copy(old), path))
            else:
                self.state_outputs.append(
                    StateOutput(value, assign, f"{path}/replaced")
                )  # no update of the old tensor
        elif is_symbolic(value):
            if symbol is not value:
                self.state_outputs.append(StateOutput(value, assign, path))
        elif is_plain(value):
            if symbol is not None or old != value:
                self.state_outputs.append(StateOutput(value, assign, path))
        elif value is not old:
            raise self._error(
                f"puts a {type(value).__name__} into its state as {path}",
                "keep tensors and numbers there; lists and dicts of them when they do not start from a gradient",
            )

    def collect_groups(
        self, before: Sequence[Mapping[str, Any]], own: Sequence[dict[str, Any]], symbols: Mapping[str, Any]
    ) -> None:
        """Entries of param groups that the step changed. `own` has the optimizer's, `symbols` those of numbers by path."""
        groups = zip(self.held.optimizer.param_groups, before, own, strict=True)
        for index, (group, old, there) in enumerate(groups):
            for key, value in group.items():
                path, known = f"{self.held.name}/group{index}/{key}", old.get(key, _NOTHING)
                if (
                    value is known
                    or key == "params"
                    or (isinstance(value, list) and _same_items(value, known))
                ):
                    continue
                if type(value) is int and type(known) is int:
                    self.counters |= {path} if value != known else set()
                elif isinstance(value, torch.Tensor):
                    real = self.inputs.real_of(known)
                    target = Copy(real) if real is not None and fits(value, real) else Assign(there, key)
                    self.state_outputs.append(StateOutput(value, target, path))
                elif is_symbolic(value) or is_plain(value):
                    self.state_outputs.append(StateOutput(value, Assign(there, key), path))
                else:
                    raise self._error(
                        f"changes the {type(value).__name__} {path}",
                        f"keep numbers or tensors there; if a scheduler changes it: {STEP_SCHEDULER}",
                    )

    def _error(self, what: str, hint: str = "a static graph keeps the form of its state") -> OptimizerError:
        return OptimizerError(
            f"the step of {self.held.name} ({type(self.held.optimizer).__name__}) {what}", hint=hint
        )


def copied_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups as they are now, their lists too."""
    return [
        {key: list(value) if isinstance(value, list) else value for key, value in group.items()}
        for group in groups
    ]


def _same_items(value: list[Any], known: Any) -> bool:
    return isinstance(known, list) and len(value) == len(known) and all(map(is_, value, known))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)
