"""The pictures of docs/ are those that their script draws."""

from __future__ import annotations

import runpy

from tests.support import ROOT


def test_the_picture_of_a_call_is_the_one_that_is_drawn() -> None:
    drawn = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["call_picture"]()
    assert (ROOT / "docs" / "pictures" / "call.svg").read_text() == drawn
