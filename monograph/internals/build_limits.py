"""Limits on how many builds code may make, for tests and for training that must not compile again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from monograph.errors import CaptureError, DefinitionError

_RUNNING = threading.local()  # the limits that hold in this thread


@dataclass
class _Limit:
    most: int
    made: list[str] = field(default_factory=list)


@contextmanager
def assert_max_builds(n: int) -> Iterator[None]:
    """Inside, the graphs of this thread make at most `n` builds together; CaptureError says why there is one more.

    >>> with assert_max_builds(0):
    ...     pass
    """
    if type(n) is not int or n < 0:
        raise DefinitionError(f"assert_max_builds({n!r})", hint="pass a number of builds from 0 on")
    outer: tuple[_Limit, ...] = getattr(_RUNNING, "limits", ())
    _RUNNING.limits = (*outer, _Limit(n))
    try:
        yield
    finally:
        _RUNNING.limits = outer


@contextmanager
def counted_build(graph: str, reason: str) -> Iterator[None]:
    """To be entered around the making of a build. Raises CaptureError if that is one too many; one that fails is none."""
    limits: tuple[_Limit, ...] = getattr(_RUNNING, "limits", ())
    build = f"{graph}: {reason}"
    for limit in limits:
        if len(limit.made) == limit.most:
            raise CaptureError(
                f"more than {limit.most} build(s): {'; '.join([*limit.made, build])}",
                hint="the last one is one too many; what changed is named after its graph",
            )
    yield
    for limit in limits:
        limit.made.append(build)
