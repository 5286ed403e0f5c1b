"""What the results of an op share with its arguments, found by running it without data."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.modes import outside_of_modes
from monograph.compat.ops import aliased_arguments, makes_memory
from monograph.compat.tensors import storage_key
from monograph.ir.call.nested import tensors_in
from monograph.ir.evaluate import example
from monograph.ir.memory import shown_values
from monograph.ir.meta import TensorMeta, frozen, metas, value

# for each tensor that is made the positions of the tensors that it shows
Sharing = tuple[frozenset[int], ...]
_CALLS: Final = 10_000  # kinds of calls that are remembered; a step has fewer than a hundred


class Probe:
    """Runs ops on the `meta` device and looks at the storages of what they return. Like calls are run once.

    Calls are alike if the op is, and the numbers, and the types and dimensions of the tensors. Their sizes do not count:
    an op that returns its argument at some sizes only, such as `reshape`, has no kernel of its own, and is unknown here.
    """

    _known: ClassVar[dict[Any, Sharing | None]] = {}  # of all graphs: it depends on nothing but the key

    def sharing(self, node: fx.Node) -> Sharing | None:
        """For each tensor that `node` makes which of its `tensor_arguments` it shows; None if that is unknown.

        What cannot run on `meta` is judged by the marks in its schema.
        """
        if aliased_arguments(node.target) is None:
            return None
        if makes_memory(node.target):
            return (frozenset(),) * len(list(metas(value(node))))
        key = (
            node.target,
            _kind(value(node)),
            *(_like(item) for item in node.args),
            *((name, _like(item)) for name, item in node.kwargs.items()),
        )
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) >= _CALLS:
                self._known.clear()
            found = self._known[key] = _probed(node)
            return found


def _like(argument: Any) -> Any:
    return _of_node(argument) if type(argument) is fx.Node else frozen(argument, _of_node)


def _of_node(node: fx.Node) -> Any:
    return _kind(value(node))


def _kind(described: Any) -> Any:
    """What counts of a value. Where there are no elements some kernels give back what they got."""
    if isinstance(described, TensorMeta):
        return described.dtype, len(described.shape), 0 in described.shape
    return tuple(map(_kind, described)) if isinstance(described, tuple) else described


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call one by one, each for the tensors in it, as often as the op gets them."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _probed(node: fx.Node) -> Sharing | None:
    if communicates(node.target):  # which would
        return _by_schema(node)
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
    places: dict[Any, list[int]] = {}
    for index, item in enumerate(arguments):
        places.setdefault(storage_key(item), []).append(index)
    return tuple(frozenset(places.get(storage_key(result), ())) for result in results)


def _by_schema(node: fx.Node) -> Sharing | None:
    results = shown_values(node) or ()
    places: dict[fx.Node, list[int]] = {}
    sources = [source for source in tensor_arguments(node) for _ in metas(value(source))]
    for index, source in enumerate(sources):
        places.setdefault(source, []).append(index)
    described = value(node)
    each = described if isinstance(described, tuple) and len(results) > 1 else (described,)
    return tuple(
        frozenset(index for source in shown for index in places.get(source, ()))
        for shown, item in zip(results, each, strict=True)
        for _ in metas(item)
    )
