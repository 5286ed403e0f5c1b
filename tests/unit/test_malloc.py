"""Freed memory is kept for the next step: seen by the page faults of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from monograph.runtime.malloc import keep_freed_memory
torch.set_num_threads(1)
told = keep_freed_memory(64 * 2**20)
def use():
    blocks = [torch.ones(4 * 2**18) for _ in range(8)]  # eight of 4 MiB
counts = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(told, min(counts))
"""


def faults(**environment: str) -> tuple[bool, int]:
    """What the function says, and the page faults of a round, the fewest of twelve: the system takes pages back."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told, count = done.stdout.split()
    return told == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept():
    kept, with_it = faults()
    assert kept
    returned, without = faults(MONOGRAPH_RETURN_MEMORY="1")
    assert not returned
    assert with_it * 4 < without, "a round goes over 32 MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_the_user_set_stays():
    kept, _ = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
