"""Sizes that may vary, as they are declared: the batch of a model that is deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monograph.errors import SignatureError
from monograph.ir.call.signature import Replicated, Spec, call_paths
from monograph.ir.call.tree import flatten, unflatten
from monograph.settings import DynamicSize


@dataclass(frozen=True)
class Dim:
    """A size by its name, from `min` to `max`, for `spec`. Two sizes of one name are equal in each call.

    >>> mg.spec((mg.Dim("batch", max=64), 3, 32, 32))
    spec((batch, 3, 32, 32), torch.float32, 'cpu')
    """

    name: str
    min: int = 1
    max: int = 1024

    def __post_init__(self) -> None:
        fits = type(self.min) is int and type(self.max) is int and 1 <= self.min <= self.max
        if not (isinstance(self.name, str) and self.name.isidentifier() and fits):
            raise SignatureError(
                f"Dim({self.name!r}, min={self.min!r}, max={self.max!r})",
                hint='a name and a range of sizes: mg.Dim("batch", min=1, max=64)',
            )

    def __repr__(self) -> str:
        return self.name

    def example(self, others: int = 0, parts: int = 1) -> int:
        """A size at which nothing is special: 1 would make broadcasts of what is none. `others` are dims before it.

        It can be split into `parts` equal ones, if there is such a size in the range.
        """
        for count in (parts, 1):  # where no size in the range can be split, the step refuses it
            size = min(self.max // count, max(-(-self.min // count), 2) + others) * count
            if size >= self.min:
                break
        return size


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_declared(known: tuple[Arguments, ...], call: Arguments) -> tuple[Arguments, ...]:
    """The calls that were declared, and another one if it has dims, or if it is described and not given: by specs alone."""
    leaves: list[Any] = []
    flatten(call, leaves)
    is_described = all(isinstance(leaf, (Spec, int, float, str, bytes, type(None))) for leaf in leaves)
    return (*known, call) if dims_in(call) or (is_described and call not in known) else known


def dims_in(arguments: Arguments) -> tuple[Dim, ...]:
    """The dims that specs among the arguments have, each once."""
    leaves: list[Any] = []
    flatten(arguments, leaves)
    found: dict[str, Dim] = {}
    for leaf in map(_bare, leaves):
        for size in leaf.shape if isinstance(leaf, Spec) else ():
            if isinstance(size, Dim) and found.setdefault(size.name, size) != size:
                raise SignatureError(
                    f"two dims named {size.name!r} have different ranges",
                    hint="make one Dim and use it in each spec",
                )
    return tuple(found.values())


def declared_sizes(arguments: Arguments, names: tuple[str, ...]) -> tuple[DynamicSize, ...]:
    """The sizes that dims of specs among the arguments declare to vary; `names` are those of the positional arguments."""
    leaves: list[Any] = []
    paths = call_paths(flatten(arguments, leaves, ()), names)
    return tuple(
        DynamicSize(path, dim, size.min, size.max, size.name)
        for path, leaf in zip(paths, map(_bare, leaves), strict=True)
        for dim, size in enumerate(leaf.shape if isinstance(leaf, Spec) else ())
        if isinstance(size, Dim)
    )


def example_sizes(arguments: Arguments, steps: int) -> dict[str, int]:
    """A size for each dim of these arguments, whose batches are split into so many micro-batches."""
    leaves: list[Any] = []
    flatten(arguments, leaves)
    split = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Spec) and leaf.shape}
    dims = dims_in(arguments)
    return {dim.name: dim.example(others, steps if dim in split else 1) for others, dim in enumerate(dims)}


def with_sizes(arguments: Arguments, sizes: Mapping[str, int]) -> Arguments:
    """The same arguments with numbers in place of dims."""
    leaves: list[Any] = []
    tree = flatten(arguments, leaves)
    filled = [_filled(leaf, sizes) for leaf in leaves]
    found: Arguments = unflatten(tree, iter(filled))
    return found


def _bare(leaf: Any) -> Any:
    """An argument without its mark."""
    return leaf.value if isinstance(leaf, Replicated) else leaf


def _filled(item: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(item, Replicated):
        return Replicated(_filled(item.value, sizes))
    if not isinstance(item, Spec):
        return item
    shape: Sequence[Any] = item.shape
    return Spec([sizes[s.name] if isinstance(s, Dim) else s for s in shape], item.dtype, item.device)
