"""`make check` finds the tests that belong to what a change touches."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.support import ROOT

TOUCHED: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "touched.py"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changed", "tested"),
    [
        ("monograph/capture/guards/flat.py", "tests/capture/guards"),
        ("monograph/capture/guards/sources/reach/reach.py", "tests/capture/guards/sources"),
        ("monograph/passes/inductor/__init__.py", "tests/passes"),
        ("monograph/amp.py", "tests/amp"),
        ("monograph/graph.py", "tests/graph"),
        ("monograph/compat/torch.py", "tests/graph"),
        ("tests/house/test_touched.py", "tests/house/test_touched.py"),
        ("tests/house/test_that_is_gone.py", None),
        ("tests/capture/traps.py", "tests/capture"),
        ("tests/support/steps.py", "tests/graph"),
        ("tests/conftest.py", "tests/graph"),
        ("docs/faq.md", "tests/house"),
        ("README.md", "tests/house"),
        ("Makefile", None),
    ],
)
def test_each_file_has_its_tests(changed: str, tested: str | None) -> None:
    assert TOUCHED["tests_of"](changed) == tested


def test_a_folder_stands_for_its_own_files_only() -> None:
    files = TOUCHED["test_files"](["monograph/capture/lazy.py", "monograph/capture/trace.py", "LICENSE"])
    assert "tests/capture/test_attributes.py" in files
    assert not any(file.startswith("tests/capture/guards") for file in files)


def test_the_change_of_now_can_be_told() -> None:
    assert all(isinstance(name, str) for name in TOUCHED["changed_files"]())
