"""Collections of garbage that a test can afford."""

from __future__ import annotations

import gc

from monograph.compat.fakes import import_capture_modules


def collect_quickly() -> None:
    """From now on collections do not look at torch: captures make many objects that live on, and ask for whole ones."""
    import_capture_modules()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
