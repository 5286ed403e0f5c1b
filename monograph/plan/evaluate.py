"""What the results of an op share with its arguments, found by running it without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.compat.modes import outside_of_modes
from monograph.compat.ops import aliased_arguments
from monograph.compat.tensors import storage_key
from monograph.ir.call.nested import tensors_in
from monograph.ir.evaluate import example
from monograph.ir.memory import shown_values
from monograph.ir.meta import TensorMeta, frozen, metas, value

# for each tensor that is made the positions of the tensors that it shows
Sharing = tuple[frozenset[int], ...]


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
        key = node.target, frozen((node.args, dict(node.kwargs)), value), value(node)
        if key not in self._known:
            self._known[key] = _probed(node)
        return self._known[key]


def tensor_arguments(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The tensors among the arguments of a call: a value, and which of its tensors."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [(item, index) for item in found for index in range(len(list(metas(value(item)))))]


def _probed(node: fx.Node) -> Sharing | None:
    count = len(list(metas(value(node))))
    arguments: list[torch.Tensor] = []

    def noted(described: TensorMeta) -> torch.Tensor:
        arguments.append(described.empty("meta"))
        return arguments[-1]

    def given(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return example(value(item), noted)
        return torch.device("meta") if isinstance(item, torch.device) else item

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), given)
    if not arguments:
        return (frozenset(),) * count
    try:
        with outside_of_modes():
            results = tensors_in(node.target(*args, **kwargs))  # type: ignore[operator]
    except Exception:  # no kernel for it, or one that does not take these arguments: nothing is at fault
        results = []
    if len(results) != count:
        return _by_schema(node)
    keys = [storage_key(item) for item in arguments]
    return tuple(
        frozenset(index for index, key in enumerate(keys) if key == storage_key(result)) for result in results
    )


def _by_schema(node: fx.Node) -> Sharing | None:
    results, places = shown_values(node) or (), tensor_arguments(node)
    described = value(node)
    each = described if isinstance(described, tuple) and len(results) > 1 else (described,)
    return tuple(
        frozenset(index for index, (source, _) in enumerate(places) if source in shown)
        for shown, item in zip(results, each, strict=True)
        for _ in metas(item)
    )
