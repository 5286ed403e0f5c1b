"""What somebody may have meant by a name that there is not."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_SUGGESTED = 5


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Names that have this one in them, and those that are spelt much like it."""
    inside = sorted(item for item in known if name in item)
    return list(dict.fromkeys([*inside, *get_close_matches(name, known, _SUGGESTED)]))[:_SUGGESTED]
