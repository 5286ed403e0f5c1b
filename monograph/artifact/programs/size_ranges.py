"""The sizes that a program with sizes that vary can be read for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, combinations

from monograph.artifact.bounds.describe import check_values
from monograph.artifact.programs.serialize import PROGRAM_KEYS, program_from_json
from monograph.artifact.programs.shapes import check_shapes
from monograph.artifact.programs.templates import instance
from monograph.artifact.schema.text import ANY_SIZE
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json
from monograph.errors import MonographError
from monograph.ir.meta import metas, value
from monograph.ir.program import Program
from monograph.sizes.expression import SMALLEST
from monograph.sizes.size import Size


def sizes_in(program: Program) -> dict[tuple[int, int], Size]:
    """The sizes of inputs that vary, by position and dimension."""
    return {
        (position, dim): size
        for position, node in enumerate(program.graph.find_nodes(op="placeholder"))
        for meta in metas(value(node))
        for dim, size in enumerate(meta.shape)
        if isinstance(size, Size)
    }


def ranges(
    stored: Json, present: Mapping[str, int], ones: Collection[frozenset[str]]
) -> tuple[tuple[str, int, int], ...]:
    """For each size of a template the smallest and the largest at which it may be called; `present` are those of a step.

    The smallest is looked for among powers of two, for one size after the other: an image can be too small for a
    convolution. It is 1 for sizes of which any together may be that, as `ones` says. Whatever size is called is checked once more.
    """
    smallest = dict(present)
    for name, size in present.items():
        lows = [SMALLEST << power for power in range(size.bit_length()) if SMALLEST << power < size]
        tried = ({**smallest, name: low} for low in lows)
        smallest = next((sizes for sizes in tried if _can_be_read(stored, sizes)), smallest)
    with_ones = {**smallest, **dict.fromkeys(_together(present, ones), 1)}
    smallest = with_ones if _can_be_read(stored, with_ones) else smallest
    return tuple((name, low, ANY_SIZE) for name, low in smallest.items())


def _together(names: Iterable[str], known: Collection[frozenset[str]]) -> list[str]:
    """Names of which all sets are known, the first ones where there are several such choices."""
    found: list[str] = []
    for name in names:
        others = chain.from_iterable(combinations(found, count) for count in range(len(found) + 1))
        if all(frozenset((name, *some)) in known for some in others):
            found.append(name)
    return found


def _can_be_read(stored: Json, sizes: Mapping[str, int]) -> bool:
    try:
        whole = {key: instance(stored[key], tuple(sizes.values())) for key in PROGRAM_KEYS}
        program = program_from_json(whole, trust=False)
        if not check_shapes(program):
            check_values(program)
    except (Damaged, MonographError):
        return False
    return True
