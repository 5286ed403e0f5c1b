"""Golden files: text that a change of the code may only change on purpose."""

from __future__ import annotations

import os
from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "golden"
REWRITE = "MONOGRAPH_REWRITE_GOLDENS"


def check_golden(name: str, text: str) -> None:
    """Compare with `tests/golden/<name>`, or write that file if the environment asks for it."""
    path = GOLDENS / name
    if os.environ.get(REWRITE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert path.exists(), f"{path} is missing; run again with {REWRITE}=1"
    expected = path.read_text().removesuffix("\n")
    assert text == expected, f"{name} differs; if it should, run again with {REWRITE}=1 and read the diff"
