"""Each Python block of the README and of the pages in docs/ runs, on its own and as it is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.warm import run_script

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> dict[int, str]:
    """The line and the text of each block, after empty lines that keep its line numbers true."""
    lines = {match: text.count("\n", 0, match.start(1)) for match in BLOCK.finditer(text)}
    return {line + 1: "\n" * line + match.group(1) for match, line in lines.items()}


BLOCKS = {
    f"{page.name}:{line}": block for page in PAGES for line, block in python_blocks(page.read_text()).items()
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
