"""Each Python block of the README and of the pages in docs/ runs, on its own and as it is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import SCRIPTS, SINGLE_ERRORS
from tests.support.warm import run_script

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_OUTPUT = re.compile(r"^```python\n([^`]*)^```\n[^`]*^```text\n([^`]*)^```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PLACE = re.compile(r"`(monograph/[^`]*\.py)`")


def python_blocks(text: str) -> dict[int, str]:
    """The line and the text of each block, after empty lines that keep its line numbers true."""
    lines = {match: text.count("\n", 0, match.start(1)) for match in BLOCK.finditer(text)}
    return {line + 1: "\n" * line + match.group(1) for match, line in lines.items()}


BLOCKS = {  # pages that are one script each are run by tests/docs
    f"{page.name}:{line}": block
    for page in PAGES
    if page.name not in (*SCRIPTS, SINGLE_ERRORS)
    for line, block in python_blocks(page.read_text()).items()
}


@pytest.mark.parametrize("place", BLOCKS)
def test_block_runs(place: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[place])
    done = run_script(
        [script.name],
        cwd=tmp_path,
        env={**os.environ, "CI": "1"},  # Hypothesis then draws the same cases each time
    )
    assert done.returncode == 0, done.stderr


def test_blocks_keep_their_lines() -> None:
    text = "a\n```python\nx = 1\n```\n```make\nall:\n```\n```python\ny = 2\n```\n"
    assert python_blocks(text) == {3: "\n\nx = 1\n", 9: "\n" * 8 + "y = 2\n"}


def test_the_readme_shows_what_its_example_prints(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    shown = WITH_OUTPUT.findall(text)
    assert len(shown) == text.count("```text") == text.count("```python") == 1
    for code, output in shown:
        (tmp_path / "train.py").write_text(code)
        done = run_script(["train.py"], cwd=tmp_path, env=os.environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip() == output.rstrip()


def test_the_readme_is_short_and_names_the_test_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert "make test" in text
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    assert len(rows) == 8
    assert [row for row in rows if row not in benchmarks] == []


def test_the_index_links_every_page() -> None:
    linked = {target for target, _ in LINK.findall((ROOT / "docs" / "index.md").read_text())}
    assert {page.name for page in DOCS} - {"index.md"} <= linked


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_links_and_places_exist(page: Path) -> None:
    text = page.read_text()
    missing = [
        f"{target}#{anchor}"
        for target, anchor in LINK.findall(BLOCK.sub("", text))
        if not re.match("https?:", target) and not _is_there(page.parent / target if target else page, anchor)
    ]
    missing += [place for place in PLACE.findall(text) if not (ROOT / place).exists()]
    assert missing == []


def _is_there(path: Path, anchor: str) -> bool:
    if not anchor or not path.exists():
        return path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
