"""Python that looks at values of tensors: random steps against eager mode."""

from __future__ import annotations

import pytest

from tests.stress.value_reads import differs
from tests.support.choice import only_quick


@pytest.mark.parametrize("seeds", only_quick([range(10), range(10, 40)], range(10)), ids=str)
def test_random_steps_that_read_values(seeds: range) -> None:
    faults = [fault for seed in seeds if (fault := differs(seed)[0])]
    assert not faults, faults[0]
