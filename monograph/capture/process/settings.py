"""Settings of torch that build() changes: ops run under those of the call in a replay, and a replay sets none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from monograph.compat.global_state import Setting, settings_of_ops, settings_of_recording
from monograph.errors import CaptureError
from monograph.state.threads import alone


@dataclass
class ProcessSettings:
    """The settings that one trace has begun with."""

    _of_ops: tuple[Setting, ...] = field(default_factory=settings_of_ops)
    _reads: tuple[Callable[[], Any], ...] = ()  # theirs: each op asks
    _before: list[Any] = field(default_factory=list)
    _fault: CaptureError | None = None

    def __post_init__(self) -> None:
        self._reads = tuple(setting.read for setting in self._of_ops)
        self._before = [read() for read in self._reads]

    def look_at_op(self) -> None:
        """Note where an op is recorded under another setting than that of the call. C++ above may take no error."""
        if self._fault is None and (now := [read() for read in self._reads]) != self._before:
            name, was, is_now = _first_change(self._of_ops, self._before, now)
            self._fault = CaptureError(
                f"{_who()} changes {name} for a part of the step, to {is_now}: a replay runs all of it "
                f"under the settings of its call, which are {was} here",
                hint="set it before the step",
            )

    def check(self) -> None:
        """Raise CaptureError for what was noted."""
        if self._fault is not None:
            raise self._fault

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around build(): raise CaptureError for a setting that it leaves changed. Afterwards they are as before."""
        settings = (*self._of_ops, *settings_of_recording())
        before = _values(settings)
        try:
            yield
            self.check()
            _check_left(settings, before)
        except Exception as error:
            if self._fault is None or error is self._fault:
                raise
            raise self._fault from error
        finally:
            if alone():  # else another thread may have set them
                _put_back(settings, before)


def _check_left(settings: tuple[Setting, ...], before: tuple[Any, ...]) -> None:
    if (now := _values(settings)) != before:
        name, was, is_now = _first_change(settings, before, now)
        raise CaptureError(
            f"{_who()} leaves {name} at {is_now}, which was {was} before: a replay changes no settings",
            hint="set it before the step, or set it back at the end of build()",
        )


def _values(settings: tuple[Setting, ...]) -> tuple[Any, ...]:
    return tuple([setting.read() for setting in settings])


def _first_change(
    settings: tuple[Setting, ...], before: Sequence[Any], now: Sequence[Any]
) -> tuple[str, Any, Any]:
    pairs = zip(settings, before, now, strict=True)
    return next((setting.name, was, is_now) for setting, was, is_now in pairs if was != is_now)


def _put_back(settings: tuple[Setting, ...], before: tuple[Any, ...]) -> None:
    for setting, value in zip(settings, before, strict=True):
        if setting.read() != value:  # one may follow another
            setting.put(value)


def _who() -> str:
    return "build()" if alone() else "build() or another thread"
