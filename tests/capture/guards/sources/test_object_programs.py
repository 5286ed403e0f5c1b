"""Random programs over random Python objects, and changes of these: no graph misses one."""

from __future__ import annotations

import pytest

from tests.stress.object_programs import Count, run_program
from tests.support.choice import only_quick


@pytest.mark.parametrize("seeds", only_quick([range(3), range(3, 20)], range(3)), ids=str)
def test_no_replay_is_stale(seeds: range) -> None:
    count = Count()
    stale = [line for seed in seeds for line in run_program(seed, count)]
    assert not stale, "\n".join(stale)
    assert count.effective > count.changes / 3
