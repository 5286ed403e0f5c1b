"""The pictures of docs/ are those that their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.support import ROOT


def test_the_picture_of_a_call_is_the_one_that_is_drawn() -> None:
    drawn = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["call_picture"]()
    assert (ROOT / "docs" / "pictures" / "call.svg").read_text() == drawn


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="other versions of torch have other ops"
)
def test_the_picture_of_a_block_is_the_one_that_is_drawn(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "tools" / "pictures.py"))["block_picture"](tmp_path / "block.svg")
    assert (ROOT / "docs" / "pictures" / "block.svg").read_text() == (tmp_path / "block.svg").read_text()
