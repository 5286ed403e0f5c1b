"""Python that looks at values of tensors: random steps against eager mode."""

from __future__ import annotations

import pytest

from tests.stress.value_reads import differs


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_steps_that_read_values(start: int) -> None:
    faults = [fault for seed in range(start, start + 20) if (fault := differs(seed)[0])]
    assert not faults, faults[0]
