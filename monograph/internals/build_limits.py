"""Limits on how many builds code may make, for tests and for training that must not compile again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from monograph.cache import BuildCache
from monograph.capture.trace import LOGGER
from monograph.errors import CaptureError, DefinitionError, shown
from monograph.internals.mistakes import Mistakes
from monograph.internals.upgrades import Upgrades
from monograph.ir.call.reason import Reason
from monograph.ir.text import count_text
from monograph.settings import Settings

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
        raise DefinitionError(f"assert_max_builds({shown(n)})", hint="pass a number of builds from 0 on")
    outer: tuple[_Limit, ...] = getattr(_RUNNING, "limits", ())
    _RUNNING.limits = (*outer, _Limit(n))
    try:
        yield
    finally:
        _RUNNING.limits = outer


def check_limit(graph: str, settings: Settings, num_builds: int, reason: Reason) -> None:
    """Raise CaptureError if no further build may be made, nor take the place of another."""
    limits: tuple[_Limit, ...] = getattr(_RUNNING, "limits", ())
    for limit in limits:
        if len(limit.made) == limit.most:
            raise CaptureError(
                f"more than {count_text(limit.most, 'build')}: {'; '.join([*limit.made, f'{graph}: {reason}'])}",
                hint="the last one is one too many; what changed is named after its graph",
            )
    most = settings.max_builds
    if most is not None and settings.keep is None and num_builds >= most:
        raise CaptureError(
            f"{graph} has {count_text(num_builds, 'build')} and would need another: {reason}",
            hint=f'max_builds is {most}; keep="recent" drops the least recently used'
            + (f"; {reason.advice}" if reason.advice else ""),
        )


def drop_for_one(
    graph: str, settings: Settings, cache: BuildCache, upgrades: Upgrades, mistakes: Mistakes
) -> None:
    """Drop the builds that were not used for the longest time, where one more would be too many."""
    if settings.max_builds is None or settings.keep is None:
        return
    dropped = cache.make_room(settings.max_builds - 1)
    for number in dropped:
        LOGGER.info("%s: build %d was dropped: max_builds is %d", graph, number, settings.max_builds)
        upgrades.forget(number)
        mistakes.watched.pop(number, None)
    if dropped:
        gc.collect()  # builds are in cycles


@contextmanager
def counted_build(graph: str, reason: Reason) -> Iterator[None]:
    """To be entered around the making of a build that `check_limit` allows. One that fails is none."""
    yield
    limits: tuple[_Limit, ...] = getattr(_RUNNING, "limits", ())
    for limit in limits:
        limit.made.append(f"{graph}: {reason}")
