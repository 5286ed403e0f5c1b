"""Programs of ranks that would hang, or give wrong numbers, are refused; those that fit each other are not.

`MONOGRAPH_EXAMPLES=1000 pytest -m long tests/distributed/test_rank_programs.py` puts in a thousand faults.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from monograph.distributed.planning.check import check_ranks
from monograph.errors import DistributedError
from tests.distributed.rank_programs import FAULTS, SETS, faulty

MANY = int(os.environ.get("MONOGRAPH_EXAMPLES", "300"))


@pytest.mark.parametrize("make", SETS)
def test_programs_that_fit_are_accepted(make):
    for seed in range(8):
        check_ranks(make(Random(seed)))


def missed(count: int) -> tuple[Counter[str], list[str]]:
    """The faults that were put in, and those that nobody found."""
    tried, left = Counter[str](), []
    for seed in range(count):
        name, ranks = faulty(Random(seed))
        tried[name] += 1
        try:
            check_ranks(ranks)
        except DistributedError:
            continue
        left.append(f"{seed}: {name}")
    return tried, left


def test_faults_are_found():
    tried, left = missed(60)
    assert left == []
    assert len(tried) > len(FAULTS) * 2 / 3


@pytest.mark.long
def test_many_faults_are_found():
    tried, left = missed(MANY)
    assert left == []
    assert tried.keys() == FAULTS.keys()
