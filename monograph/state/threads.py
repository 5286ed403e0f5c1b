"""Whether what has changed was changed by this thread."""

from __future__ import annotations

import threading


def alone() -> bool:
    """True if no other thread runs a user's code, so that what has changed was changed by this one.

    The thread of tqdm, which torch's interpreter of graphs starts, watches progress bars.
    """
    here = threading.current_thread()
    return all(item is here or type(item).__module__ == "tqdm._monitor" for item in threading.enumerate())
