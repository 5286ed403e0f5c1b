"""Each piece of a plain loop on the page about porting trains to the same bits as its graph."""

from __future__ import annotations

from pathlib import Path

from tests.support.pages import blocks_of, docs, printed_by

# prints what the block has made of the model
DIGEST = (
    "print('DIGEST', __import__('hashlib').sha256(b''.join(value.numpy().tobytes() for value in "
    "model.state_dict().values())).hexdigest() if 'model' in globals() else '')"
)


def test_before_and_after_have_the_same_bits(tmp_path: Path) -> None:
    page = docs("porting.md")
    blocks = blocks_of(page)
    printed = printed_by(page, tmp_path, after=DIGEST)
    made = [(block.label, text.partition("DIGEST ")[2]) for block, text in zip(blocks, printed, strict=True)]
    before = [digest for label, digest in made if label == "Before"]
    after = [digest for label, digest in made if label == "After"]
    assert len(before) >= 10
    assert before == after
    assert len(set(before)) == 7  # plain, clipped, two schedules, untrained, mixed precision, accumulated
