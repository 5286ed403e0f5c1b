"""State that other ranks of a pipeline have: it is no part of what this one saves, and need not be in what it loads."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from monograph.compat.distributed.groups import rank_in
from monograph.distributed.pipeline.bound import pipeline_of
from monograph.internals.internals import Internals
from monograph.state.find import Owned
from monograph.state_dict.loading import Part, read_parts


def without_others(graph: Internals, state: dict[str, Any]) -> dict[str, Any]:
    """The state without parameters and buffers that other ranks update, and without what belongs to them."""
    paths = graph.builds[-1].captured.shares.elsewhere if graph.builds else frozenset[str]()
    if paths:
        owned = graph.owned()
        others = {id(item) for path, _, _, item in _entries(owned) if path in paths}
        for part, key in _places(owned, others):
            found = _table(state.get(part), part, owned)
            if isinstance(found, MutableMapping):
                found.pop(key, None)
    return state


def with_others(graph: Internals, given: Any, parts: Mapping[str, Part]) -> Any:
    """A state that is loaded, with the present one in place of what other ranks have and it lacks."""
    owned = graph.owned()
    if not isinstance(given, Mapping):
        return given
    pipeline = pipeline_of(owned, owned.named_modules(), graph.settings)
    if pipeline is None:
        return given
    present = read_parts(parts)
    ranks, own = pipeline.orders.ranks, rank_in(pipeline.group)
    known = graph.builds[-1].captured.shares.elsewhere if graph.builds else frozenset[str]()
    others = set[int]()
    for path, _, _, item in _entries(owned):
        stage = pipeline.stage_of(path.rpartition(".")[0])
        if path in known or (stage is not None and ranks[stage] != own):
            others.add(id(item))
    found: dict[str, Any] = {
        key: {**part, "state": dict(part["state"])}
        if isinstance(part, Mapping) and isinstance(part.get("state"), Mapping)
        else copy.copy(part)
        for key, part in given.items()
    }
    for part, key in _places(owned, others):
        table, own_table = _table(found.get(part), part, owned), _table(present.get(part), part, owned)
        if isinstance(table, MutableMapping) and key not in table and key in (own_table or {}):
            table[key] = own_table[key]
    return found


def _entries(owned: Owned) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """The tensors of modules: the path, the part of the state and the key there, and the tensor itself."""
    for name, module in owned.modules.items():
        for key, item in module.state_dict(keep_vars=True).items():
            if isinstance(item, torch.Tensor):
                yield f"{name}.{key}", name, key, item


def _places(owned: Owned, others: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Where a state has these tensors, and what optimizers and averages keep for them: the part, and the key."""
    for _, part, key, item in _entries(owned):
        if id(item) in others:
            yield part, key
    for one in owned.optimizers:
        for index, parameter in enumerate(one.parameters):
            if id(parameter) in others:
                yield one.name, index
    for average in owned.averages:
        for key, item in average.module.state_dict(keep_vars=True).items():
            if id(item) in others:
                yield f"ema.{average.path}", f"module.{key}"


def _table(part: Any, name: str, owned: Owned) -> Any:
    """The table of a part that has the keys."""
    is_optimizer = any(one.name == name for one in owned.optimizers)
    return part.get("state") if is_optimizer and isinstance(part, Mapping) else part
