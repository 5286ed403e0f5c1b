"""`make size` prints its tables."""

from __future__ import annotations

import runpy

import pytest

from tests.support import ROOT

SIZE = ROOT / "tools" / "size.py"


def test_size_counts_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SIZE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lines per part"
    assert lines[-1].endswith("fields of Settings")
