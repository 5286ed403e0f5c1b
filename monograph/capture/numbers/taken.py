"""Ints among the arguments of which a step takes the very value: as a size, an index, a count of a loop, a key, a text."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch

from monograph.errors import CaptureError
from monograph.user_code.lines import Origin

# What gives the same for many numbers: a condition on it serves them all.
MANY_TO_ONE = frozenset(
    {
        operator.floordiv, operator.mod, operator.abs, math.floor, math.ceil, math.trunc, round, torch.sym_max,
        torch.sym_min,
    }
)  # fmt: skip


BOUND = 2**44  # for ints that enter compiled code: their sums are exact as floats, and in its 64 bits


class ValuesTaken(CaptureError):
    """A step cannot take some ints as they come. `places` says of each, by its leaf, where its value is taken."""

    def __init__(self, places: Mapping[int, Origin]) -> None:
        super().__init__("the step takes the very value of an int", where=next(iter(places.values())))
        self.places = places
