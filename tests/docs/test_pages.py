"""Pages that are one script each print what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import SCRIPTS, blocks_of, docs, is_shown, printed_by, shape_of


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_shows_what_its_blocks_print(name: str, tmp_path: Path) -> None:
    page = docs(name)
    for block, printed in zip(blocks_of(page), printed_by(page, tmp_path), strict=True):
        assert (block.output is None) == (not printed.strip()), block.code
        assert is_shown(shape_of(printed), shape_of(block.output or "")), printed


def test_numbers_may_differ_and_words_may_not() -> None:
    assert shape_of("a step takes 1.25 ms\n") == shape_of("a step takes   31 ms")
    assert is_shown("one\ntwo\nthree", "one\n...\nthree")
    assert not is_shown("one\ntwo\nthree", "one\n...\nfour")
    assert not is_shown("one\ntwo", "one")
