"""Modules see their parameters whole while they run, where processes hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from monograph.compat.distributed.fully_shard import (
    ShardedModule,
    ShardedParameter,
    is_sharded_module,
    put_back_shards,
    sharded_modules,
    unknown_wishes,
    without_hooks,
)
from monograph.compat.modes import current_tracer
from monograph.compat.modules import FLAT_WEIGHTS, mark_parameter, parameters_of, weights_in_order
from monograph.distributed.gather import Cast, gathered, kept_whole
from monograph.distributed.programs.begun import GATHER, TOGETHER
from monograph.distributed.programs.gather_again import AGAIN
from monograph.distributed.zero import is_of_zero
from monograph.errors import DistributedError
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.meta import add_label


class WholeParameters:
    """Runs modules with whole parameters. `seen(tensor)` is a parameter as this thread sees it."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        seen: Callable[[Any], Any],
        kept: Mapping[int, tuple[torch.Tensor, bool]] = MappingProxyType({}),
    ) -> None:
        """`kept` has by id of a parameter the whole of it, where that is there already, and if its gradient stays whole."""
        self._seen, self._kept = seen, kept
        found = [*sharded_modules(iter(modules.values())), *_of_zero(modules.values(), kept)]
        self._of: dict[int, ShardedModule] = {id(item.module): item for item in found}
        self._known: dict[
            int, torch.Tensor
        ] = {}  # whole parameters of modules that run, by id of their shards
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

    def read(self, its_own: Callable[[nn.Module, str], Any], module: nn.Module, name: str) -> Any:
        """An attribute of a module: what a graph has laid out itself is whole for all code of modules that run."""
        found = its_own(module, name)
        if self._depth and (there := self._outside.get((id(module), name))) is not None:
            known, item = there
            return self._taken(known, item) if found is self._seen(item.sharded) else found
        return found

    def _taken(self, known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        """The whole parameter, which is gathered if that has not been done for a module around this one."""
        if (whole := self._known.get(id(item.sharded))) is None:
            begun = len(nodes := current_tracer().graph.nodes)
            whole = self._whole(known, item)
            mark_parameter(whole)
            if known.gathers_again:
                for node in islice(nodes, begun, None):
                    for label in (AGAIN, TOGETHER)[: 1 + known.shares] if node.target is GATHER else ():
                        add_label(node, label)
        if known.shares:
            self._known[id(item.sharded)] = whole
        return whole

    def _whole(self, known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        parameter = item.sharded
        shown = self._seen(parameter)
        if id(parameter) in self._kept:
            whole, stays = self._kept[id(parameter)]
            return whole if stays else kept_whole(shown, whole.detach())
        return gathered(shown, item.inner, Cast(known.parameter_type, known.gradient_type))

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
                table[name] = whole  # type: ignore[assignment]
        before += _with_weights({owner for item in known.parameters for owner, _ in item.places})
        try:
            with without_hooks(module, known.hooks):
                returned = call(module, *args, **kwargs)
        finally:
            for table, name, parameter in before:
                table[name] = parameter
        return returned if known.output_type is None else _cast(returned, known.output_type)


def _of_zero(modules: Iterable[nn.Module], kept: Container[int]) -> Iterator[ShardedModule]:
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
    """Raise DistributedError for a module that `fully_shard` has in a way that no graph knows; all have their shards again."""
    for path, module in modules.items():
        if is_sharded_module(module):
            if wish := unknown_wishes(module):
                raise DistributedError(
                    f"{path} is fully_shard()ed {wish}, which a graph does not do",
                    hint="shard it without; gradients of micro-batches are added by config.set_gradient_accumulation_steps(n)",
                )
            put_back_shards(module)


def _cast(item: Any, dtype: torch.dtype | None) -> Any:
    leaves: list[Any] = []
    tree = flatten(item, leaves)
    floating = (leaf.is_floating_point() if isinstance(leaf, torch.Tensor) else False for leaf in leaves)
    cast = [leaf.to(dtype) if is_one else leaf for leaf, is_one in zip(leaves, floating, strict=True)]
    return unflatten(tree, iter(cast))
