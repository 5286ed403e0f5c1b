"""Headers of torch that are compiled before: where they are kept, and when they are worth it."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from monograph.compat.inductor.directories import TORCHS, cache_directories
from monograph.compat.patching import replaced

_BYTES: Final = 512 << 20  # that must be free
_STEPS: Final = 3


def are_worth_compiling() -> bool:
    """True where it can be expected that the next steps gain more than compiled headers take: 9 s and much room.

    A step gains 3 s. So headers are compiled once as many steps were compiled here as would have paid for them. Torch
    tells states of them apart by openssl.
    """
    return _is_used_often() and _has_room() and shutil.which("openssl") is not None


def _is_used_often() -> bool:
    steps = (step for place in cache_directories().read for step in (place / "steps").glob("*/step.so"))
    return len(list(islice(steps, _STEPS))) == _STEPS


def _has_room() -> bool:
    try:
        return shutil.disk_usage(os.environ.get(TORCHS) or tempfile.gettempdir()).free > _BYTES
    except OSError:
        return False


@contextmanager
def headers_with_the_rest() -> Iterator[None]:
    """Keep headers that are compiled in Inductor's directory while the block runs.

    What: the places of `codecache`, which are in the directory for temporary files whatever TORCHINDUCTOR_CACHE_DIR says.
    Degraded path: they stay there.
    """
    codecache = importlib.import_module("torch._inductor.codecache")
    folder = Path(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())
    folder /= "precompiled_headers"
    with ExitStack() as stack:
        for name, place in (("_HEADER_DIR", folder), ("_HEADER_LOCK_DIR", folder / "locks")):
            if hasattr(codecache, name):
                stack.enter_context(replaced(codecache, name, str(place)))
        yield
