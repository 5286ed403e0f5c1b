"""Pages that are one script each print what they show, and each piece of a loop trains to the same bits as its graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.pages import SCRIPTS, Block, blocks_of, docs, is_shown, printed_by, shape_of

PORTING = "porting.md"
# prints what the block has made of the model
DIGEST = (
    "print('MADE', __import__('hashlib').sha256(b''.join(value.numpy().tobytes() for value in "
    "model.state_dict().values())).hexdigest() if 'model' in globals() else '')"
)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != PORTING])
def test_a_page_shows_what_its_blocks_print(name: str, tmp_path: Path) -> None:
    page = docs(name)
    for block, printed in zip(blocks_of(page), printed_by(page, tmp_path), strict=True):
        assert_shown(block, printed)


def test_before_and_after_have_the_same_bits(tmp_path: Path) -> None:
    page = docs(PORTING)
    made: Mapping[str, list[str]] = {"Before": [], "After": [], "": []}
    for block, text in zip(blocks_of(page), printed_by(page, tmp_path, after=DIGEST), strict=True):
        printed, _, digest = text.partition("MADE ")
        assert_shown(block, printed)
        made[block.label].append(digest)
    assert made["Before"] == made["After"]
    # plain, clipped, two schedules, untrained, mixed precision, accumulated, two optimizers, one of them now and then, an update by
    # hand, LBFGS, an agent
    kinds = 12
    assert len(set(made["Before"])) == kinds


def test_numbers_may_differ_and_words_may_not() -> None:
    assert shape_of("a step takes 1.25 ms\n") == shape_of("a step takes   31 ms")
    assert is_shown("one\ntwo\nthree", "one\n...\nthree")
    assert not is_shown("one\ntwo\nthree", "one\n...\nfour")
    assert not is_shown("one\ntwo", "one")


def assert_shown(block: Block, printed: str) -> None:
    assert (block.output is None) == (not printed.strip()), block.code
    assert is_shown(shape_of(printed), shape_of(block.output or "")), printed
