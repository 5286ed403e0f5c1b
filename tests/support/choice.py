"""What `make test` runs of a test with many cases: the first and the last one. `make test-all` runs three more, `make search` all.

`costly.txt` says how long costly cases take: `make test` leaves out what takes a second or more, and `make test-all` runs
no more than those two of a test with such a case. Cases on the compiled backend do not count where a test has others: the tests of
`tests/backends` are about that one. What is left out of `make test` gets the mark `long`, and what is left out of both
the mark `search`. Where this choice is not a good one, tests say so: `@pytest.mark.every_case` keeps all cases, which
take no time then; `@pytest.mark.one_case` keeps the first one, where a case takes half a second; `@pytest.mark.long`
leaves out the test, and `only_quick` says which cases stand for it; `@pytest.mark.quick` keeps a costly one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.costly import known_seconds, test_of

_CASES = 3  # beside those that stand for their test


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark what `make test` leaves out as `long`, and what `make test-all` leaves out too as `search`."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[test_of(item.nodeid)].append(item)
    seconds = known_seconds()
    costly = set(map(test_of, seconds))
    for name, cases in tests.items():
        chosen = _standing_for(cases)
        others = [item for item in cases if item not in chosen and not any(item.iter_markers("search"))]
        num_kept = 0 if name in costly else min(_CASES, len(others))
        kept = [others[number * len(others) // num_kept] for number in range(num_kept)]
        for item in cases:
            is_quick = seconds.keys().isdisjoint({item.nodeid, name}) or any(item.iter_markers("quick"))
            if item not in chosen or not is_quick:
                item.add_marker("long")
            if item not in chosen and item not in kept:
                item.add_marker("search")


def _standing_for(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that stand for their test: all that say so, the first and the last of the others."""
    free = [item for item in cases if not {"long", "search"} & {mark.name for mark in item.iter_markers()}]
    always = [item for item in free if any(item.iter_markers("every_case"))]
    others = [item for item in free if item not in always]
    others = [item for item in others if not _is_compiled(item)] or others
    last = 0 if any(cases[0].iter_markers("one_case")) else -1
    return always + ([others[0], others[last]] if others else [])


def only_quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values for `parametrize`: each chosen one is quick, and all others are for `make test-all`."""
    marks = {True: pytest.mark.every_case, False: pytest.mark.long}
    return [pytest.param(value, marks=marks[value in chosen]) for value in values]


def _is_compiled(item: pytest.Item) -> bool:
    cases = getattr(item, "callspec", None)
    return cases is not None and any(
        value == "inductor" for value in cases.params.values() if isinstance(value, str)
    )
