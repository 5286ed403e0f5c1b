"""What went into a module and what came out of it, described without keeping any tensor alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monograph.compat.modes import outside_of_function_modes
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.ir.call.parameters import argument_name, argument_names
from monograph.ir.meta import ScalarMeta, TensorMeta, describe, is_described

_DEPTH = 6  # of nesting; what a module takes may be any object, even one that holds itself


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, or a number known at run time only, and its path as the user would write it."""

    path: str
    value: TensorMeta | ScalarMeta


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The tensors and moving numbers of one call. Constants among the arguments are left out."""

    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]


def describe_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Leaf, ...]:
    """The leaves that a module is called with; `names` are those of the parameters of its `forward`."""
    positional = [(argument_name(names, index), item) for index, item in enumerate(args)]
    return describe_leaves([*positional, *kwargs.items()])


def describe_leaves(named: Iterable[tuple[str, Any]]) -> tuple[Leaf, ...]:
    """The leaves of nested values, each given with the path that it begins with."""
    found = ((where, _described(leaf)) for path, item in named for where, leaf in leaves(item, path))
    return tuple(Leaf(where, described) for where, described in found if described is not None)


def leaves(item: Any, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The tensors and moving numbers in a nested value, each with its path, which begins with `path`."""
    if isinstance(item, torch.Tensor) or is_symbolic(item):
        yield path, item
    elif depth > 0:
        for step, entry in _entries(item):
            yield from leaves(entry, path + step, depth - 1)


def _entries(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, dict):
        return ((f'["{key}"]' if isinstance(key, str) else f"[{key!r}]", item[key]) for key in item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return ((f".{name}", entry) for name, entry in zip(item._fields, item, strict=False))
    if isinstance(item, (tuple, list)):
        return ((f"[{index}]", entry) for index, entry in enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        # past __getattribute__, which may be watched: what is read only to describe it is not guarded
        table = vars(item) if hasattr(item, "__dict__") else {}
        names = [field.name for field in dataclasses.fields(item)]
        return ((f".{name}", table.get(name)) for name in names)
    return iter(())


def _described(item: Any) -> TensorMeta | ScalarMeta | None:
    with outside_of_function_modes():  # they would see each question about a tensor
        # reading a symbolic size as a number would add a guard, and other layouts have no strides
        unknown = isinstance(item, torch.Tensor) and (
            item.layout is not torch.strided or not all(map(is_described, item.shape))
        )
        described = None if unknown else describe(item)
    assert not isinstance(described, tuple)
    return described


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module's `forward`."""
    # past nn.Module.__getattribute__, which is watched during a trace
    own: Callable[..., Any] | None = object.__getattribute__(module, "__dict__").get("forward")
    try:
        return argument_names(own) if own is not None else argument_names(type(module).forward)[1:]
    except (TypeError, ValueError):  # a forward written in C has no signature
        return ()
