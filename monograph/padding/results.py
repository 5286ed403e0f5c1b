"""Which dimensions of results follow the sizes of padded arguments, and the results cut back to the sizes without padding.

That is observed: the step is run with several sizes. A dimension is cut where its size was that of one group of arguments, plus
the same number, each time; what follows in another way stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ir.call.tree import Tree, flatten, leaf_paths, unflatten
from monograph.padding.arguments import Fit

_ENOUGH = 3  # sizes that a dimension was seen to follow, so that half of a size, or a size in blocks, is not taken for it


@dataclass(frozen=True)
class Observation:
    """The form of the results of a step with arguments of these sizes, by group."""

    sizes: tuple[int, ...]
    tree: Tree
    shapes: tuple[tuple[int, ...] | None, ...]  # None for leaves that are no tensors

    @staticmethod
    def of(sizes: Sequence[int], result: Any) -> Observation:
        """That of one step."""
        leaves: list[Any] = []
        tree = flatten(result, leaves)
        return Observation(tuple(sizes), tree, tuple(map(_shape, leaves)))


@dataclass(frozen=True)
class _Follows:
    """A dimension of a result whose size is that of a group, plus a number."""

    dim: int
    group: int
    more: int


@dataclass(frozen=True)
class Rules:
    """For each leaf of the results of a step the dimensions that are cut; None for a leaf that is left as it is."""

    leaves: tuple[tuple[_Follows, ...] | None, ...]

    @staticmethod
    def seen_in(observations: Sequence[Observation]) -> Rules:
        """What follows from steps of several sizes, the padded one first."""
        first, *others = observations
        if any(other.tree != first.tree for other in others):
            return Rules.unknown(first)
        rows = zip(*(item.shapes for item in observations), strict=True)
        sizes = [item.sizes for item in observations]
        return Rules(tuple([_followed(row, sizes) for row in rows]))

    @staticmethod
    def unknown(observation: Observation) -> Rules:
        """Results of one or more dimensions are left as they are."""
        return Rules(tuple([None if shape else () for shape in observation.shapes]))

    def cut(
        self, result: Any, fits: Sequence[Fit], given: Mapping[int, torch.Tensor]
    ) -> tuple[Any, list[str]]:
        """A result without what padding has added, and the paths of those parts of it that are left as they are.

        `given` has what the caller gave by the ids of its padded copies, which may be results.
        """
        leaves: list[Any] = []
        tree = flatten(result, leaves)
        if len(leaves) != len(self.leaves):
            return result, ["result"]
        left, is_cut = [], False
        for index, (leaf, rows) in enumerate(zip(leaves, self.leaves, strict=True)):
            if rows == ():
                continue
            found = given.get(id(leaf))
            if found is None:
                found = _cut(leaf, rows, fits)
            if found is None:
                left.append(index)
            else:
                leaves[index], is_cut = found, True
        paths = list(leaf_paths(tree, "result")) if left else []
        return unflatten(tree, iter(leaves)) if is_cut else result, [paths[index] for index in left]


def _followed(
    shapes: Sequence[tuple[int, ...] | None], sizes: Sequence[tuple[int, ...]]
) -> tuple[_Follows, ...] | None:
    if any(shape is None for shape in shapes):
        return ()
    if len({len(shape) for shape in shapes if shape is not None}) > 1:
        return None
    found = []
    for dim, values in enumerate(zip(*(shape for shape in shapes if shape is not None), strict=True)):
        if len(set(values)) == 1:
            continue
        rows = [
            row for group in range(len(sizes[0])) if (row := _follows(dim, values, group, sizes)) is not None
        ]
        if len(rows) != 1:
            return None
        found += rows
    return tuple(found)


def _follows(
    dim: int, values: Sequence[int], group: int, sizes: Sequence[tuple[int, ...]]
) -> _Follows | None:
    of_group = [item[group] for item in sizes]
    more = {value - size for value, size in zip(values, of_group, strict=True)}
    is_enough = len(set(of_group)) >= _ENOUGH or (more == {0} and max(of_group) - min(of_group) > 1)
    return _Follows(dim, group, more.pop()) if len(more) == 1 and is_enough else None


def _cut(leaf: Any, rows: tuple[_Follows, ...] | None, fits: Sequence[Fit]) -> Any:
    """The part of a tensor that is not padding; None if that is not known."""
    if rows is None or not isinstance(leaf, torch.Tensor):
        return None
    for row in rows:
        fit = fits[row.group]
        size = fit.present + row.more
        if leaf.dim() <= row.dim or leaf.shape[row.dim] != fit.padded + row.more or size < 0:
            return None
        leaf = leaf.narrow(row.dim, 0, size)
    return leaf


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
