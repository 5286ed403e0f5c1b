"""Writes which tests take long, from a log of pytest with `--durations=0`: `python -m tests.support.costly LOG`.

Their long cases run by `make search`, and not by `make test-all` (`choice.py`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_SECONDS = 3.0  # of one case, on two quiet cores
_LINE = re.compile(r"\s*([\d.]+)s (?:setup|call|teardown)\s+(\S.*?)\s*$")


def costly_tests(log: str, known: Iterable[str]) -> list[str]:
    """The names of tests of which a case took longer; of `known` ones also those that the log does not have."""
    seconds = Counter[str]()
    for found in filter(None, map(_LINE.match, log.splitlines())):
        seconds[found[2]] += float(found[1])
    slowest = Counter[str]()
    for case, spent in seconds.items():
        name = case.partition("[")[0]
        slowest[name] = max(slowest[name], spent)
    costly = {name for name, spent in slowest.items() if spent > _SECONDS}
    return sorted(costly | {name for name in known if name not in slowest})


if __name__ == "__main__":
    file = Path(__file__).with_name("costly.txt")
    file.write_text("\n".join(costly_tests(Path(sys.argv[1]).read_text(), file.read_text().split())) + "\n")
