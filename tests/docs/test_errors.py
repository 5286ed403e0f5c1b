"""The page of errors has an example of each class, which raises what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import monograph as mg
from tests.support.pages import SINGLE_ERRORS, blocks_of, docs, errors_of

PAGE = docs(SINGLE_ERRORS)
WITHOUT = {"TornStateError"}  # memory has to run out in the middle of a compiled step


def classes_below(kind: type) -> set[str]:
    return {
        name
        for one in kind.__subclasses__()
        if getattr(mg, one.__name__, None) is one
        for name in (one.__name__, *classes_below(one))
    }


def test_examples_raise_what_the_page_shows(tmp_path: Path) -> None:
    assert errors_of(PAGE, tmp_path) == [block.output for block in blocks_of(PAGE)]


def test_each_class_has_an_example() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == classes_below(mg.MonographError)
    shown = {(block.output or "").partition(":")[0] for block in blocks_of(PAGE)}
    assert shown == classes_below(mg.MonographError) - WITHOUT
