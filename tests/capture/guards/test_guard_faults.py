"""The faults that are put into the guards by hand still have their places in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import monograph
from tests.stress.mutate_guards import FAULTS, place_of

PACKAGE = Path(monograph.__file__).parent


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted({fault[0] for fault in FAULTS}))
def test_a_fault_has_one_place(name: str) -> None:
    text = place_of(name, PACKAGE).read_text()
    moved = [old for file, old, _ in FAULTS if file == name and text.count(old) != 1]
    assert not moved, f"tests/stress/mutate_guards.py is out of date: {moved}"
