"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile(
    "monograph", deadline=None, derandomize=True
)  # no time limits, the same cases each run
settings.load_profile("monograph")
