"""Calls take no memory of the system, at whatever depth of the stack they are made."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest

from monograph.state.frames import in_one_piece


def add(a: int, *, b: int = 1) -> int:
    """A sum."""
    return a + b


def test_a_function_stays_what_it_is():
    function = in_one_piece(add)
    assert function(1) == 2
    assert function(1, b=3) == 4
    assert (function.__name__, function.__doc__) == ("add", "A sum.")
    with pytest.raises(TypeError, match="unexpected"):
        function(1, c=2)  # type: ignore[call-arg]


def many_calls() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2_000):
        add(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, function: Callable[[], Any]) -> Any:
    return function() if depth == 0 else at_depth(depth - 1, function)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames lie apart there")
def test_no_depth_of_the_stack_is_slow():
    found = in_one_piece(lambda: [at_depth(depth, many_calls) for depth in range(300)])()
    assert max(found) < 1_000, "a call that gets memory touches new pages each time"
