"""Random programs over random Python objects: 300 changes, none of which a graph misses."""

from __future__ import annotations

import pytest

from tests.stress.object_programs import Count, run_program


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_replay_is_stale(first: int) -> None:
    count = Count()
    stale = [line for seed in range(first, first + 10) for line in run_program(seed, count)]
    assert not stale, "\n".join(stale)
    assert count.effective > count.changes / 3
