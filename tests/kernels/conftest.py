"""Tests of kernels begin with a cache that knows no choice."""

from __future__ import annotations

import pytest

from monograph.kernels import tuned as choices_module
from tests.support import new_cache


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    """Each test begins knowing nothing."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})
