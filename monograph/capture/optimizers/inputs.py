"""The inputs that optimizers give: their state, tensors and numbers in param groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.capture.optimizers.tracing import Declared, group_counters, hyperparameters, state_numbers
from monograph.capture.tensors.fakes import Inputs
from monograph.ir.port import Role
from monograph.state.find import RegisteredOptimizer, Slot, optimizer_slots


@dataclass
class OptimizerInputs:
    """Makes inputs of what optimizers keep; knows the symbols of numbers, and whose state each input is."""

    inputs: Inputs
    names: Mapping[int, str]  # of parameters, by id
    declared: Mapping[str, list[Declared]]  # first state, by optimizer
    known_counters: frozenset[str]  # whole numbers in param groups that the step moves
    waiting: Mapping[int, Any]  # owners of state that is there, and that eager mode makes in this step, by id
    symbols: dict[str, Any] = field(default_factory=dict)  # of numbers in param groups and in state by path
    counters: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # of those in state by container and key
    states: dict[str, Any] = field(default_factory=dict)  # the real state before the step, by optimizer
    _owners: dict[str, tuple[str, Any]] = field(default_factory=dict)  # by path of an input: optimizer, owner

    def add(self, registered: RegisteredOptimizer) -> None:
        """The inputs of one optimizer."""
        for index, group in enumerate(registered.optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    self.inputs.add_state(
                        Slot(group, key, f"{registered.name}/group{index}/{key}", Role.OPTIM)
                    )
        state = dict(registered.optimizer.state)
        state.update({first.parameter: first.entries for first in self.declared.get(registered.name, ())})
        self.states[registered.name] = state
        for owner, entries in state.items():
            for slot in optimizer_slots(registered, {owner: entries}, self.names):
                self.inputs.add_state(slot)
                self._owners[slot.path] = registered.name, owner
            for path in state_numbers(registered, {owner: entries}, self.names):
                self._owners[path] = registered.name, owner
        for path, number in hyperparameters(registered).items():
            self.symbols[path] = self.inputs.add_number(number, Role.HYPER, path)
        for path, number in group_counters(registered, self.known_counters).items():
            self.symbols[path] = self.inputs.add_number(number, Role.OPTIM, path)
        for path, number in state_numbers(registered, state, self.names).items():
            symbol = self.inputs.add_number(number, Role.OPTIM, path)
            self.counters.setdefault(id(number.container), {})[number.key] = symbol

    def first(self, registered: RegisteredOptimizer) -> list[Any]:
        """The owners whose state eager mode makes in this step."""
        declared = [first.parameter for first in self.declared.get(registered.name, ())]
        return declared + [owner for owner in registered.optimizer.state if id(owner) in self.waiting]

    def owner_of(self, path: str) -> tuple[str, Any]:
        """The optimizer whose state an input is, and the owner of that state; an empty name for other inputs."""
        return self._owners.get(path, ("", None))


def state_with_fakes(entries: Any, inputs: Inputs, counters: Mapping[int, Mapping[Any, Any]]) -> Any:
    """Optimizer state of the same form, with fakes for tensors and symbols for numbers.

    `counters` maps the id of a dict or list to {key: symbol}.
    """
    if not isinstance(entries, (dict, list)):
        return inputs.fake(entries)
    numbers = counters.get(id(entries), {})
    made = {
        key: numbers[key] if key in numbers else state_with_fakes(entry, inputs, counters)
        for key, entry in (entries.items() if isinstance(entries, dict) else enumerate(entries))
    }
    return made if isinstance(entries, dict) else list(made.values())
