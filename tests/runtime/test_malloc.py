"""Freed memory is kept for the next step: seen in the C library's own count, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KEPT = """
import ctypes, torch
from monograph.runtime.malloc import keep_freed_memory

class Counts(ctypes.Structure):  # struct mallinfo, as in malloc.h
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

counts = ctypes.CDLL(None).mallinfo
counts.restype = Counts
torch.set_num_threads(1)
told = keep_freed_memory(64 * 2**20)
assert keep_freed_memory(2**20) == told  # a smaller step later changes nothing

def use():
    blocks = [torch.ones(4 * 2**18) for _ in range(8)]  # eight of 4 MiB

use()
print(told, counts().fordblks)
"""


def kept(**environment: str) -> tuple[bool, int]:
    """What the function says, and how many freed bytes the process holds after it used 32 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told, nbytes = done.stdout.split()
    return told == "True", int(nbytes)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept():
    told, nbytes = kept()
    assert told
    assert nbytes >= 32 * 2**20
    told, nbytes = kept(MONOGRAPH_RETURN_MEMORY="1")
    assert not told
    assert nbytes < 16 * 2**20


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_the_user_set_stays():
    told, nbytes = kept(MALLOC_TRIM_THRESHOLD_="131072")
    assert not told
    assert nbytes < 16 * 2**20
