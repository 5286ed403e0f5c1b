"""How long costly cases of tests take, for `choice.py`: `python -m tests.support.costly LOG` writes it.

The log is one of pytest with `--durations=0`, on two quiet cores. Times only grow, since a log need not have all cases:
delete the line of a case that is made quicker.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

_FILE = Path(__file__).with_name("costly.txt")  # whole seconds and a case, from one second on
_LINE = re.compile(r"\s*([\d.]+)s (setup|call|teardown)\s+(\S.*?)\s*$")


def known_seconds() -> dict[str, int]:
    """The whole seconds of costly cases, and of what all cases of a test need first, by the name of the test."""
    lines = (line.split(maxsplit=1) for line in _FILE.read_text().splitlines())
    return {case: int(seconds) for seconds, case in lines}


def test_of(case: str) -> str:
    """The name of the test of a case."""
    return case.partition("[")[0]


def in_log(log: str) -> dict[str, int]:
    """The whole seconds in a log."""
    seconds: dict[str, float] = defaultdict(float)
    for spent, part, case in (line.groups() for line in filter(None, map(_LINE.match, log.splitlines()))):
        seconds[test_of(case) if part == "setup" else case] += float(spent)
    return {case: int(spent) for case, spent in seconds.items()}


if __name__ == "__main__":
    known = known_seconds()
    for case, spent in in_log(Path(sys.argv[1]).read_text()).items():
        known[case] = max(known.get(case, 0), spent)
    _FILE.write_text("".join(f"{known[case]} {case}\n" for case in sorted(known) if known[case]))
