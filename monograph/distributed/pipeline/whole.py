"""All of a model in each process of a pipeline, for a step in eager mode: what other ranks have is there for that step alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from monograph.compat.distributed.groups import objects_of_all, rank_in
from monograph.compat.distributed.tensors import is_sharded, part_of, with_local
from monograph.compat.modules import flat_weights_of
from monograph.compat.patching import replace_here
from monograph.compat.tensors import planned_device
from monograph.distributed.pipeline.bound import Shares
from monograph.distributed.pipeline.stages import Pipeline
from monograph.distributed.zero import parts_of_whole
from monograph.errors import DistributedError
from monograph.ir.port import Role
from monograph.settings import Settings
from monograph.state.exchanged import calls_with, mapped
from monograph.state.find import Owned, module_slots
from monograph.state.random import default_generators, read_generators, restore_generators


@contextmanager
def whole_model(owned: Owned, settings: Settings, pipeline: Pipeline, shares: Shares) -> Iterator[None]:
    """Inside, modules, optimizers and averages have the state of all ranks, and each stage draws from the generator of its rank.

    All ranks enter it. What happens to the state of others is lost at the end. Raises DistributedError for a step in which ranks
    draw random numbers in another order than one process.
    """
    if shares.draws:
        raise DistributedError(
            f"a step in eager mode runs all stages of the pipeline in each process, which would draw other random numbers: {shares.draws}",
            hint="compare a step that draws none: model.eval() switches dropout off",
        )
    modules, rank = owned.named_modules(), rank_in(pipeline.group)
    state = _State(owned, modules, shares.owners)
    generators = default_generators({planned_device(slot.tensor.device) for slot in state.slots})
    given = state.of_rank(rank), read_generators(generators)
    of_all = objects_of_all(given, pipeline.group)
    draws = _Draws(pipeline, modules, rank, generators, [random for _, random in of_all])
    with ExitStack() as stack:
        state.take([item for item, _ in of_all], rank, settings, stack)
        draws.enter(stack)
        yield


@dataclass(frozen=True)
class _Given:
    """What a rank has for others: tensors of modules by path, and what belongs to these."""

    tensors: Mapping[str, torch.Tensor]
    entries: Mapping[tuple[str, str], Any]  # of optimizers, by name and path
    averages: Mapping[tuple[str, str], torch.Tensor]  # by the path of the average and that of the tensor


@dataclass(frozen=True)
class _Sent:
    """A tensor that optimizers keep, with the type of device where it is; of a DTensor what a process has."""

    local: torch.Tensor
    device: str
    is_part: bool


class _State:
    """The state of a graph that a rank updates alone."""

    def __init__(self, owned: Owned, modules: Mapping[str, nn.Module], owners: Mapping[str, int]) -> None:
        self._owned, self._modules, self._owners = owned, modules, owners
        self.slots = list(module_slots(modules))
        self._paths: dict[int, str] = {}  # the path by which the step knows a tensor
        for slot in self.slots:
            if slot.path in owners:
                self._paths.setdefault(id(slot.tensor), slot.path)

    def of_rank(self, rank: int) -> _Given:
        """What this rank has, to be sent."""

        def path(item: Any) -> str | None:
            found = self._paths.get(id(item))
            return found if found is not None and self._owners[found] == rank else None

        optimizers = ((item.name, item.optimizer.state.items()) for item in self._owned.optimizers)
        weights = (
            (average.path, average.weights[name], parameter)
            for average in self._owned.averages
            for name, parameter in average.module.named_parameters()
        )
        return _Given(
            {found: _copied(slot.tensor) for slot in self.slots if (found := path(slot.tensor))},
            {
                (name, found): mapped(entries, _sent)
                for name, states in optimizers
                for owner, entries in states
                if (found := path(owner))
            },
            {(name, found): _copied(item) for name, item, owner in weights if (found := path(owner))},
        )

    def take(self, of_all: Sequence[_Given], rank: int, settings: Settings, stack: ExitStack) -> None:
        """Put copies of what others have in the place of what is here of it, until the stack ends."""
        made: dict[int, Any] = {}
        known: dict[int, tuple[str, _Given]] = {}  # the path of each of these, and who has it
        for slot in self.slots:
            old, path = slot.tensor, self._paths.get(id(slot.tensor))
            is_own = slot.role is Role.CAPTURED and not old.is_meta  # of a plain tensor each rank has its own
            if path is None or self._owners[path] == rank or is_own:
                continue
            if id(old) not in made:
                owner = of_all[self._owners[path]]
                new = owner.tensors[path].to(planned_device(old.device))
                made[id(old)] = nn.Parameter(new, old.requires_grad) if slot.role is Role.PARAM else new
                known[id(old)] = known[id(made[id(old)])] = path, owner
            slot.container[slot.key] = made[id(old)]
            stack.callback(slot.container.__setitem__, slot.key, old)
        for module in self._modules.values():
            weights = flat_weights_of(module)
            stack.callback(vars(module).update, weights)
            vars(module).update(mapped(weights, lambda item: made.get(id(item), item)))
        self._take_averages(known, stack)
        self._take_entries(made, known, settings, stack)
        stack.enter_context(calls_with(made))

    def _take_averages(self, known: Mapping[int, tuple[str, _Given]], stack: ExitStack) -> None:
        for average in self._owned.averages:
            for name, parameter in average.module.named_parameters():
                if id(parameter) in known:
                    path, owner = known[id(parameter)]
                    stack.callback(average.weights.__setitem__, name, average.weights[name])
                    average.weights[name] = owner.averages[average.path, path].to(parameter.device)

    def _take_entries(
        self,
        made: Mapping[int, Any],
        known: Mapping[int, tuple[str, _Given]],
        settings: Settings,
        stack: ExitStack,
    ) -> None:
        for item in self._owned.optimizers:
            stack.callback(_put_back, item.optimizer, dict(item.optimizer.state), made)
            for old in [old for old in item.optimizer.state if id(old) in made]:
                del item.optimizer.state[old]
            for group in item.optimizer.param_groups:
                stack.callback(group.__setitem__, "params", group["params"])
                group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]
        parts = parts_of_whole(self._owned, settings)
        for item in self._owned.optimizers:
            for parameter in item.parameters:
                path, owner = known.get(id(parameter), ("", None))
                if owner is not None and (item.name, path) in owner.entries:
                    taken = partial(_taken, like=parts.get(id(parameter)), device=parameter.device)
                    item.optimizer.state[parameter] = mapped(owner.entries[item.name, path], taken)


def _put_back(optimizer: torch.optim.Optimizer, before: Mapping[Any, Any], made: Mapping[int, Any]) -> None:
    """Leave the optimizer its state without that of others, in the order in which it was."""
    foreign, state = set(map(id, made.values())), optimizer.state
    now = {owner: entries for owner, entries in state.items() if id(owner) not in foreign}
    there = {owner: now.pop(owner, entries) for owner, entries in before.items()}
    state.clear()
    state.update(there | now)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _sent(item: Any) -> Any:
    """What an optimizer keeps, in a form that other processes can read."""
    local = part_of(item)
    return (
        _Sent(_copied(local), local.device.type, is_sharded(item))
        if isinstance(local, torch.Tensor)
        else item
    )


def _taken(item: Any, like: Any, device: torch.device) -> Any:
    """What an optimizer of another process keeps. Of a DTensor this one has the same rows as that."""
    if not isinstance(item, _Sent):
        return item
    local = item.local if item.device == "cpu" else item.local.to(device)
    return with_local(like, local, requires_grad=False) if item.is_part else local


class _Draws:
    """The generators of this process, with the state of those of the rank whose stage runs."""

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Mapping[str, nn.Module],
        rank: int,
        generators: Sequence[torch.Generator],
        states: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        stages = {id(module): pipeline.stage_of(path) for path, module in modules.items()}
        ranks = pipeline.orders.ranks
        self._ranks = {key: ranks[stage] for key, stage in stages.items() if stage is not None}
        self._generators, self._states = generators, list(states)
        self._rank = self._own = rank  # whose generators run

    def enter(self, stack: ExitStack) -> None:
        """Until the stack ends, modules that run draw by the rank of their stage. Afterwards this rank has drawn its own numbers."""
        stack.callback(self._go_to, self._own)
        replace_here(stack, nn.Module, "__call__", partial(self._called, nn.Module.__call__))

    def _called(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = self._rank
        self._go_to(self._ranks.get(id(module), before))
        try:
            return call(module, *args, **kwargs)
        finally:
            self._go_to(before)

    def _go_to(self, rank: int) -> None:
        if rank != self._rank:
            self._states[self._rank] = read_generators(self._generators)
            restore_generators(self._generators, self._states[rank])
            self._rank = rank
