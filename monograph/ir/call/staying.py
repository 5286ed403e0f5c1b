"""Ints among the arguments that stay numbers: the step takes their very values, so that each has a build."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from monograph.ir.call.signature import Call
from monograph.ir.call.tree import Tree
from monograph.user_code.lines import Origin


@dataclass
class _Int:
    place: Origin  # where its value is taken
    asked: int = 1  # how often it was to be in a new build


@dataclass
class Staying:
    """Which stay, by the form of a call and the leaf.

    A branch that was not taken yet may take no value, so they are asked again at the 2nd, 4th, 8th ... further build.
    """

    _ints: dict[tuple[Tree, int], _Int] = field(default_factory=dict)

    def note(self, call: Call, places: Mapping[int, Origin]) -> None:
        """Ints of a call stay, by their leaves, since their values are taken in these places."""
        for leaf, place in places.items():
            self._ints.setdefault((call.tree, leaf), _Int(place)).place = place

    def of(self, call: Call, leaves: Collection[int]) -> set[int]:
        """Those of some leaves that stay in the next build."""
        return {leaf for leaf in leaves if self._stays(call.tree, leaf)}

    def _stays(self, tree: Tree, leaf: int) -> bool:
        known = self._ints.get((tree, leaf))
        if known is None:
            return False
        known.asked += 1
        return known.asked < 4 or bool(known.asked & known.asked - 1)

    def about(self, call: Call, difference: str) -> str:
        """Where the value of the int is taken that a sentence is about; "" if it is about another argument."""
        paths = call.paths()
        for (tree, leaf), known in self._ints.items():
            if (
                tree == call.tree
                and difference.startswith(f"argument {paths[leaf]} is ")
                and known.place.file
            ):
                return f"; the value of {paths[leaf]} is taken at {known.place}"
        return ""
