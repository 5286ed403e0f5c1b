"""Collections of garbage that a test can afford."""

from __future__ import annotations

import gc

from monograph.compat.fakes import import_capture_modules


def collect_quickly() -> None:
    """From now on collections do not look at what is there: captures that fail ask for whole ones.

    With torch, its databases and what hundreds of captures leave in caches, one takes half a second.
    """
    import_capture_modules()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
