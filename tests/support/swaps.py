"""A build of the default backend, taken from `aten` to `exact` in as few steps as that takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import monograph as mg
from monograph.internals import upgrades
from monograph.internals.internals import internals_of

STEPS_BEFORE = (
    4  # by which time code is compiled: one finds out what is missing, two ask for code, one takes it
)
_SECONDS = 240.0


@pytest.fixture
def swaps_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet; compiled code is worth while at once."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(upgrades, "_WORTH_IT", 0.0)


def wait_for_compiler(graph: mg.Graph) -> None:
    """Return once what is compiled beside the newest build is done."""
    found = internals_of(graph).upgrades.pending.get(graph.builds[-1].number)
    end = time.monotonic() + _SECONDS
    while (
        isinstance(found, upgrades.ToExact)
        and found.compilation is not None
        and not found.compilation.is_done()
    ):
        assert time.monotonic() < end, "the compiler does not come to an end"
        time.sleep(0.02)
