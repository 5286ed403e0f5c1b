"""Python's collector of cycles while a step is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# objects between two collections, not 700: a capture keeps what it makes, and one walk over all that torch and sympy
# have takes 0.12 s, a sixth of the capture of twelve layers
_OBJECTS = 50_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run seldom; one that somebody has stopped, or made rarer, stays as it is."""
    before = gc.get_threshold()
    rarer = (max(before[0], _OBJECTS), *before[1:])
    if before[0]:
        gc.set_threshold(*rarer)
    try:
        yield
    finally:
        if gc.get_threshold() == rarer:  # and is not what build() has set
            gc.set_threshold(*before)
