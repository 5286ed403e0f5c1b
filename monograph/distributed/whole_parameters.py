"""Modules see their parameters whole while they run, where processes hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from monograph.compat.distributed.fully_shard import (
    ShardedModule,
    ShardedParameter,
    is_sharded_module,
    sharded_modules,
    unknown_wishes,
    without_hooks,
)
from monograph.compat.modules import FLAT_WEIGHTS, mark_parameter, parameters_of, weights_in_order
from monograph.distributed.zero import is_of_zero
from monograph.errors import DistributedError
from monograph.ir.call.tree import flatten, unflatten


class Source(Protocol):
    """Where whole parameters come from."""

    @property
    def kept(self) -> Container[int]:
        """The ids of parameters that are whole between steps, too, and of which this process updates a part."""

    def seen(self, parameter: Any) -> Any:
        """A parameter as this thread sees it outside of modules."""

    def whole(self, known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        """All of a parameter, as it is now, for a module that runs."""

    def changes(self, item: ShardedParameter) -> int:
        """How often the step has changed it."""


class WholeParameters:
    """Runs modules with whole parameters."""

    def __init__(self, found: Iterable[ShardedModule], source: Source) -> None:
        self._source, found = source, [*found]
        self._of: dict[int, ShardedModule] = {id(item.module): item for item in found}
        # those of modules that run, by id of their shards, with what had changed them before
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        self._placed: dict[tuple[int, str], torch.Tensor] = {}  # in tables of modules that run
        self._depth = 0
        self._outside = {  # those that any module may read, not their own alone
            (id(owner), name): (known, item)
            for known in found
            if not known.hooks
            for item in known.parameters
            for owner, name in item.places
        }

    def __bool__(self) -> bool:
        return bool(self._of)

    def run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        self._depth += 1
        try:
            return self._run(call, module, args, kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self._known.clear()
                self._placed.clear()

    def read(self, its_own: Callable[[nn.Module, str], Any], module: nn.Module, name: str) -> Any:
        """An attribute of a module: what a graph has laid out itself is whole for all code of modules that run."""
        found = its_own(module, name)
        if self._depth and (there := self._outside.get((id(module), name))) is not None:
            known, item = there
            if found is self._source.seen(item.sharded) or found is self._placed.get((id(module), name)):
                return self._taken(known, item)
        return found

    def _taken(self, known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        """The whole parameter, which is gathered if that has not been done since it was changed."""
        whole, before = self._known.get(id(item.sharded), (None, -1))
        if whole is None or before != self._source.changes(item):
            whole = self._source.whole(known, item)
            mark_parameter(whole)
            if known.shares:
                self._known[id(item.sharded)] = whole, self._source.changes(item)
        return whole

    def _run(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if (known := self._of.get(id(module))) is None:
            return call(module, *args, **kwargs)
        if known.casts_inputs:
            args, kwargs = _cast((args, kwargs), known.parameter_type)
        before: list[tuple[dict[str, Any], str, Any]] = []
        for item in known.parameters:
            whole = self._taken(known, item)
            for owner, name in item.places:
                table = parameters_of(owner)
                before.append((table, name, table[name]))
                table[name] = self._placed[id(owner), name] = whole  # type: ignore[assignment]
        before += _with_weights({owner for item in known.parameters for owner, _ in item.places})
        try:
            with without_hooks(module, known.hooks):
                returned = call(module, *args, **kwargs)
        finally:
            for table, name, parameter in before:
                table[name] = parameter
        return returned if known.output_type is None else _cast(returned, known.output_type)


def modules_with_parts(modules: Iterable[nn.Module], kept: Container[int]) -> Iterator[ShardedModule]:
    """Those with parameters in parts, whoever has laid them out. `kept` are the ids of those that stay whole besides."""
    modules = [*modules]
    yield from sharded_modules(iter(modules))
    yield from modules_of_zero(modules, kept)


def modules_of_zero(modules: Iterable[nn.Module], kept: Container[int]) -> Iterator[ShardedModule]:
    """Modules with parameters that a graph has laid out itself; one that several have is gathered once."""
    for module in modules:
        table = parameters_of(module).items()
        own = [(name, item) for name, item in table if is_of_zero(item) or id(item) in kept]
        if own and not is_sharded_module(module):
            parameters = tuple(ShardedParameter(item, ((module, name),)) for name, item in own)
            yield ShardedModule(module, parameters, gathers_again=True, shares=True)


def _with_weights(owners: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Recurrent layers have a list of their weights, too; gives what was there."""
    for owner in owners:
        if isinstance(owner, nn.RNNBase):
            table = vars(owner)
            yield table, FLAT_WEIGHTS, table[FLAT_WEIGHTS]
            table[FLAT_WEIGHTS] = weights_in_order(owner, parameters_of(owner))


def check_sharded(modules: Mapping[str, nn.Module]) -> None:
    """Raise DistributedError for a module that `fully_shard` has in a way that no graph knows."""
    for path, module in modules.items():
        if is_sharded_module(module) and (wish := unknown_wishes(module)):
            raise DistributedError(
                f"{path} is fully_shard()ed {wish}, which a graph does not do",
                hint="shard it without; gradients of micro-batches are added by config.set_gradient_accumulation_steps(n)",
            )


def _cast(item: Any, dtype: torch.dtype | None) -> Any:
    leaves: list[Any] = []
    tree = flatten(item, leaves)
    floating = (leaf.is_floating_point() if isinstance(leaf, torch.Tensor) else False for leaf in leaves)
    cast = [leaf.to(dtype) if is_one else leaf for leaf, is_one in zip(leaves, floating, strict=True)]
    return unflatten(tree, iter(cast))
