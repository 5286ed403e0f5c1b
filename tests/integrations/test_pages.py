"""Each page is one script that prints what it shows, and each example trains."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import MARK, blocks_of, is_shown, shape_of

PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples" / "integrations").glob("*.py"))
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Hydra has the log of the process go to what is standard output at the time."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_its_blocks_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = blocks_of(page)
    script = tmp_path / "train.py"
    script.write_text("".join(f"{block.code}print({MARK!r})\n" for block in blocks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script.name])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out.split(f"{MARK}\n")[:-1]
    for block, text in zip(blocks, printed, strict=True):
        assert (block.output is None) == (not text.strip()), block.code
        assert is_shown(shape_of(text), shape_of(block.output or "")), text


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_trains_and_is_short(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(example.read_text().splitlines()) <= 80
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [example.name, "--epochs", "2"])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()
