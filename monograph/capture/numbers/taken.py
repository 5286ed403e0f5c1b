"""Numbers of which a step takes the very value: as a size, an index, a count of a loop, a key, a text, a constant of an op."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

import torch

from monograph.errors import CaptureError
from monograph.user_code.files import is_user_file
from monograph.user_code.lines import Origin, user_place

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


class Taken(NamedTuple):
    """Where the very value of a number is taken: the user's line, and the function of torch that it calls, if it is one."""

    where: Origin
    function: str = ""


def taken_here() -> Taken:
    """The line on the stack, and the outermost function of torch that the line calls."""
    frame: FrameType | None = sys._getframe(1)
    place, name = user_place(frame), ""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "__torch_function__":
            name = getattr(frame.f_locals.get("func"), "__name__", name)
        frame = frame.f_back
    return Taken(place, name)
