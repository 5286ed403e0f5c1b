"""Where the sizes that vary are found among the inputs of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from monograph.sizes.size import Size


class SizePlace(NamedTuple):
    """An input and one of its dimensions, which is as long as `parts` of this size."""

    position: int
    dim: int
    parts: int = 1

    def text(self, item: str) -> str:
        """The size as Python over the input, which goes by this name."""
        whole = f"{item}.size({self.dim})"
        return whole if self.parts == 1 else f"({whole} // {self.parts})"


def places_in(shapes: Iterable[Sequence[int]]) -> Iterator[tuple[str, SizePlace]]:
    """Each place of a size that varies, with its name."""
    for position, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if isinstance(size, Size):
                name, parts = size.name_and_parts
                yield name, SizePlace(position, dim, parts)


def size_places(shapes: Iterable[Sequence[int]]) -> dict[str, SizePlace]:
    """The first place of each size; one that has it undivided comes before others."""
    found: dict[str, SizePlace] = {}
    for name, place in places_in(shapes):
        if name not in found or place.parts < found[name].parts:
            found[name] = place
    return found
