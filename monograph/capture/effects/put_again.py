"""Attributes that a step sets without having asked for them: each step leaves the same there, whatever it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class PutAgain:
    """What each step leaves in dicts of attributes, by name. Mostly it is there already."""

    places: Sequence[tuple[dict[str, Any], str, Any]]

    def apply(self) -> None:
        """As after the step."""
        for table, name, value in self.places:
            if table.get(name, _ABSENT) is not value:
                table[name] = value
