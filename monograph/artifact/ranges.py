"""Which programs an artifact holds for declared ranges of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from monograph.artifact.pack import PackedProgram
from monograph.artifact.programs.templates import NoTemplateError, Sample, Sizes, join, points
from monograph.checkpoint.errors import Refused
from monograph.ir.call.dims import Arguments, Dim, dims_in
from monograph.ir.call.signature import Spec, TensorKey
from monograph.ir.call.tree import Tree, flatten

Range = tuple[str, int, int]  # a name, the smallest and the largest size


class NotOneProgram(Refused):
    """No one program serves all sizes in a range."""


def packed_templates(sampled: Callable[[Sizes], PackedProgram], dims: Sequence[Range]) -> list[PackedProgram]:
    """Programs for all sizes in these ranges, one apart for the smallest or the largest where that is another program.

    `NotOneProgram` where none is right for a range.
    """
    return _packed(sampled, dims, dims)


def _packed(
    sampled: Callable[[Sizes], PackedProgram], dims: Sequence[Range], declared: Sequence[Range]
) -> list[PackedProgram]:
    try:
        return [_template(sampled, points([(low, high) for _, low, high in dims]), dims)]
    except NoTemplateError as error:
        if parts := next(_in_parts(sampled, dims, declared), ()):
            return [program for part in parts for program in _packed(sampled, part, declared)]
        shown = ", ".join(f"{name} from {low} to {high}" for name, low, high in dims)
        raise NotOneProgram(
            f"the step is not the same program for {shown}: {error}",
            "code that branches on a size, or loops over it, makes such programs: declare a smaller range, or numbers in place of the dims",
        ) from None


def _in_parts(
    sampled: Callable[[Sizes], PackedProgram], dims: Sequence[Range], declared: Sequence[Range]
) -> Iterator[tuple[Sequence[Range], Sequence[Range]]]:
    """The ranges with one of them in two parts: torch omits ops for sizes of 1, and a slice of all of a table."""

    def parted(index: int, last: int) -> tuple[Sequence[Range], Sequence[Range]]:
        name, low, high = dims[index]
        before, after = dims[:index], dims[index + 1 :]
        return [*before, (name, low, last), *after], [*before, (name, last + 1, high), *after]

    for index, (_, low, high) in enumerate(dims):
        if low < high == declared[index][2]:
            sizes = [low for _, low, _ in dims]
            largest = [(*sizes[:index], size, *sizes[index + 1 :]) for size in (high - 1, high)]
            try:
                _template(sampled, largest, dims)
            except NoTemplateError:
                yield parted(index, high - 1)
    for index, (_, low, high) in enumerate(dims):
        if low == 1 < high:
            yield parted(index, 1)


def _template(
    sampled: Callable[[Sizes], PackedProgram], at: Sequence[Sizes], dims: Sequence[Range]
) -> PackedProgram:
    """The program of these ranges, from those at some sizes."""
    samples = [(sizes, sampled(sizes)) for sizes in at]
    first = samples[0][1]
    for _, other in samples[1:]:
        same = other.tensors.keys() == first.tensors.keys()
        if not same or not all(_is_same(other.tensors[path], item) for path, item in first.tensors.items()):
            raise NoTemplateError("it takes other tensors from outside at another size")
    program, results, arguments = (  # the program first, whose errors name an op
        join([Sample(sizes, getattr(packed, what)) for sizes, packed in samples])
        for what in ("program", "results", "arguments")
    )
    return PackedProgram(arguments, results, program, first.tensors, tuple(dims))


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True for one tensor, and for constants of build() that are equal."""
    if tensor is other:
        return True
    return (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and torch.equal(tensor, other)


def beside(ranges: Arguments, declared: Sequence[Arguments]) -> list[Arguments]:
    """The calls at single sizes which differ from a call with ranges in nothing but sizes that are outside of these."""
    leaves: list[Any] = []
    tree = flatten(ranges, leaves)
    found = []
    for item in declared:
        others: list[Any] = []
        if not dims_in(item) and flatten(item, others) == tree and _is_outside(leaves, others):
            found.append(item)
    return found


def _is_outside(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    outside = False
    for leaf, other in zip(leaves, others, strict=True):
        if not isinstance(leaf, Spec) or not isinstance(other, Spec):
            if type(leaf) is not type(other) or leaf != other:
                return False
            continue
        if (leaf.dtype, leaf.device, len(leaf.shape)) != (other.dtype, other.device, len(other.shape)):
            return False
        for expected, size in zip(leaf.shape, other.shape, strict=True):
            if not isinstance(expected, Dim) and expected != size:
                return False
            outside |= isinstance(expected, Dim) and not expected.min <= size <= expected.max
    return outside


def fits(declared: Arguments, tree: Tree, keys: Sequence[Any]) -> bool:
    """True if a step for such arguments was made for sizes in the declared ranges."""
    leaves: list[object] = []
    if flatten(declared, leaves) != tree:
        return False
    return all(_leaf_fits(leaf, key) for leaf, key in zip(leaves, keys, strict=True))


def _leaf_fits(leaf: object, key: object) -> bool:
    if not isinstance(leaf, Spec):
        return True
    return (
        isinstance(key, TensorKey)
        and (key.dtype, key.device, key.requires_grad) == (leaf.dtype, leaf.device, False)
        and len(key.shape) == len(leaf.shape)
        and all(
            expected.min <= int(size) <= expected.max if isinstance(expected, Dim) else size == expected
            for expected, size in zip(leaf.shape, key.shape, strict=True)
        )
    )
