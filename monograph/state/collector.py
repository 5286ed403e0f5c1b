"""Python's collector of cycles, which waits while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# objects between two collections, not 700: a capture keeps what it makes, as imports do, and one walk over all that torch
# and sympy have takes 0.09 s, a third of the import of this package and a sixth of the capture of twelve layers
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
        if gc.get_threshold() == rarer:  # and not what build() has set
            gc.set_threshold(*before)
