"""Branches that a step took by values: an exported file has one program, and cannot take the other one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from monograph.artifact.pack import Step
from monograph.capture.tensors.conditions import INPUT, NUMBER, Conditions
from monograph.checkpoint.errors import Refused
from monograph.ir.graph_signature import Argument

_SIZE: Final = re.compile(r"\bi\[\d+\]\.size\(\d+\)")


def branches(conditions: Conditions) -> Iterator[tuple[str, frozenset[int]]]:
    """What each is about, and the positions of the inputs whose values decide it; sizes are no values."""
    read = () if conditions.read_out is None else conditions.read_out.read()
    for about, text in zip(conditions.about, conditions.texts, strict=True):
        values = _SIZE.sub("", text)
        inputs = frozenset(map(int, INPUT.findall(values)))
        yield about, inputs.union(*(read[int(number)] for number in NUMBER.findall(values)))


def check_branches(step: Step) -> None:
    """`Refused` if the value of an argument decides a branch."""
    for about, positions in branches(step.conditions):
        if any(isinstance(step.bound.sources[position], Argument) for position in positions):
            raise Refused(
                f"`{about}` holds for these arguments, and others may need another program",
                "compute it with torch.where, or deploy it with mg.save(graph, path), which checks that before each call",
            )
