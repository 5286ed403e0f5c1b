"""Writes which tests take long, from a log of pytest with `--durations=0`: `python -m tests.support.costly LOG`.

Their long cases run by `make search`, and not by `make test-all` (`choice.py`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_SECONDS = 3.0  # of one case, on two quiet cores
_LINE = re.compile(r"\s*([\d.]+)s (?:setup|call|teardown)\s+(\S.*?)\s*$")


def costly(log: str) -> list[str]:
    """The names of tests of which a case took longer."""
    seconds = Counter[str]()
    for found in filter(None, map(_LINE.match, log.splitlines())):
        seconds[found[2]] += float(found[1])
    return sorted({case.partition("[")[0] for case, spent in seconds.items() if spent > _SECONDS})


if __name__ == "__main__":
    Path(__file__).with_name("costly.txt").write_text("\n".join(costly(Path(sys.argv[1]).read_text())) + "\n")
