"""What the results of an op share with its arguments, found by running it without data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monograph.compat.torch import aliased_arguments, named_arguments, outside_of_modes, storage_key
from monograph.ir.meta import ScalarMeta, TensorMeta, value

Sharing = tuple[
    frozenset[int], ...
]  # for each tensor that is made the positions of the tensors that it shows
_NUMBERS = {"int": 1, "float": 1.0, "bool": True}


class Probe:
    """Runs ops on the `meta` device and looks at the storages of what they return. Like calls are run once."""

    def __init__(self) -> None:
        self._known: dict[Any, Sharing | None] = {}

    def sharing(self, node: fx.Node) -> Sharing | None:
        """For each tensor that `node` makes which of its `tensor_arguments` it shows; None if that is unknown.

        What cannot run on `meta` is judged by the marks in its schema.
        """
        if aliased_arguments(node.target) is None:
            return None
        key = node.target, _key(node.args), _key(node.kwargs), _key(value(node))
        if key not in self._known:
            self._known[key] = _probed(node)
        return self._known[key]


def tensor_arguments(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The tensors among the arguments of a call: a value, and which of its tensors."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [(item, index) for item in found for index in range(len(list(metas(value(item)))))]


def metas(described: Any) -> Iterator[TensorMeta]:
    """The tensors in the description of a value, in order."""
    if isinstance(described, (tuple, list)):
        for item in described:
            yield from metas(item)
    elif isinstance(described, TensorMeta):
        yield described


def without_data(meta: TensorMeta) -> torch.Tensor:
    """A tensor of this form that has no data."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _probed(node: fx.Node) -> Sharing | None:
    count = len(list(metas(value(node))))
    arguments: list[torch.Tensor] = []
    args = _example(node.args, arguments)
    kwargs = _example(node.kwargs, arguments)
    if not arguments:
        return (frozenset(),) * count
    try:
        with outside_of_modes():
            results = list(_tensors(node.target(*args, **kwargs)))  # type: ignore[operator]
    except Exception:  # no kernel for it, or one that does not take these arguments: nothing is at fault
        results = []
    if len(results) != count:
        return _by_schema(node)
    keys = [storage_key(item) for item in arguments]
    return tuple(
        frozenset(index for index, key in enumerate(keys) if key == storage_key(result)) for result in results
    )


def _by_schema(node: fx.Node) -> Sharing | None:
    marks = aliased_arguments(node.target) or ()
    named = named_arguments(node.target, node.args, node.kwargs)
    places = tensor_arguments(node)

    def shown(names: frozenset[str]) -> frozenset[int]:
        nodes: list[fx.Node] = []
        fx.map_arg([named.get(name) for name in names], nodes.append)
        return frozenset(index for index, (item, _) in enumerate(places) if item in nodes)

    described = value(node)
    each = described if isinstance(described, tuple) and len(marks) > 1 else (described,)
    return tuple(shown(names) for names, item in zip(marks, each, strict=True) for _ in metas(item))


def _example(item: Any, made: list[torch.Tensor]) -> Any:
    """An argument to run with; its tensors are noted in `made`."""
    match item:
        case fx.Node():
            return _example(value(item), made)
        case TensorMeta():
            made.append(without_data(item))
            return made[-1]
        case ScalarMeta(kind):
            return _NUMBERS[kind]
        case torch.device():
            return torch.device("meta")
        case tuple() | list():
            return type(item)(_example(entry, made) for entry in item)
        case dict():
            return {key: _example(entry, made) for key, entry in item.items()}
    return item


def _tensors(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, (tuple, list)):
        for item in results:
            yield from _tensors(item)
    elif isinstance(results, torch.Tensor):
        yield results


def _key(item: Any) -> Any:
    """What distinguishes calls: descriptions in place of values."""
    match item:
        case fx.Node():
            return _key(value(item))
        case tuple() | list():
            return (type(item), *map(_key, item))
        case dict():
            return tuple((name, _key(entry)) for name, entry in item.items())
        case slice():
            return repr(item)
    return type(item), item
