"""Blocks get their places in one piece of memory: those that live at the same time do not meet, whatever a run does."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from monograph.runtime import one_piece

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the heap is used")

SIZES = (20_000, 64_000, 64_064, 300_000, 1_000_000)


class Steps:
    """Runs of one step, that are steps of Python here."""

    def __init__(self) -> None:
        self._code = one_piece._code()
        self._steps = self._code.monograph_new_steps()

    @contextmanager
    def run(self) -> Iterator[bool]:
        """Inside, this thread takes memory as the step."""
        is_on = self._code.monograph_begin(self._steps)
        try:
            yield is_on
        finally:
            if is_on:
                self._code.monograph_end(True)


def block(nbytes: int, number: int) -> torch.Tensor:
    """Memory that is full of a number."""
    return torch.empty(nbytes, dtype=torch.uint8).fill_(number)


def played(script: list[tuple[str, int, int]]) -> dict[int, int]:
    """Take and give back blocks as a script says, and see that each holds its number to its end; their addresses."""
    held: dict[int, torch.Tensor] = {}
    places: dict[int, int] = {}
    for what, name, nbytes in script:
        if what == "take":
            held[name] = block(nbytes, name % 251)
            places[name] = held[name].data_ptr()
        else:
            assert bool((held.pop(name) == name % 251).all()), name
    assert all(bool((item == name % 251).all()) for name, item in held.items())
    return places


def script_of(seed: int, length: int = 60) -> list[tuple[str, int, int]]:
    """Blocks of some sizes that live for a while; all are given back in the end."""
    drawn, open_names, script = random.Random(seed), list[int](), list[Any]()
    for name in range(length):
        script.append(("take", name, drawn.choice(SIZES)))
        open_names.append(name)
        while open_names and drawn.random() < 0.45:
            script.append(("give", open_names.pop(drawn.randrange(len(open_names))), 0))
    return script + [("give", name, 0) for name in open_names]


def most_at_once(script: list[tuple[str, int, int]]) -> int:
    held, most = dict[int, int](), 0
    for what, name, nbytes in script:
        if what == "take":
            held[name] = nbytes
        else:
            del held[name]
        most = max(most, sum(held.values()))
    return most


def test_blocks_have_the_same_places_in_each_run_and_hold_what_they_should():
    for seed in range(20):
        steps, script = Steps(), script_of(seed)
        found = []
        for _ in range(3):
            with steps.run() as is_on:
                assert is_on
                found.append(played(script))
        assert found[1] == found[2]
        extent = max(found[1].values()) - min(found[1].values())
        assert extent <= 1.3 * most_at_once(script)


def test_a_run_that_does_something_else_has_whole_blocks_too():
    steps, usual = Steps(), script_of(0)
    for seed in range(1, 20):
        with steps.run():
            played(usual[: 10 * seed % 50] + script_of(seed) if seed % 2 else usual)


def test_a_run_after_one_that_did_something_else_is_watched_again():
    steps, first, second = Steps(), script_of(1), script_of(2)
    for script in (first, second, second):  # seen, missed, seen
        with steps.run():
            played(script)
    found = []
    for _ in range(2):
        with steps.run():
            found.append(played(second))
    assert found[0] == found[1]


def test_what_misses_all_the_time_is_left_to_the_heap():
    steps = Steps()
    told = []
    for seed in range(40):
        with steps.run() as is_on:
            told.append(is_on)
            played(script_of(seed))
    assert told[0]
    assert not told[-1]


def test_a_block_that_outlives_its_run_is_no_ones_else():
    steps, kept = Steps(), []
    for number in range(6):
        with steps.run():
            first = block(300_000, 1)
            kept.append(block(300_000, 100 + number))
            del first
            block(300_000, 2)
    for number, item in enumerate(kept):
        assert bool((item == 100 + number).all())


def test_a_run_inside_another_takes_from_the_heap():
    outer, inner = Steps(), Steps()
    for _ in range(3):
        with outer.run() as is_on:
            held = block(300_000, 7)
            with inner.run() as is_inner_on:
                assert is_on
                assert not is_inner_on
            assert bool((held == 7).all())
            del held


def test_the_piece_is_given_back_between_runs():
    steps = Steps()
    for _ in range(3):
        with steps.run():
            played(script_of(3))
        one_piece.give_back()
