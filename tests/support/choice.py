"""What `make test` runs of a test with many cases: the first and the last one. `make test-all` runs three more, `make search` all.

Cases on the compiled backend do not count where a test has others: the tests of `tests/backends` are about that one.
What is left out of `make test` gets the mark `long`, and what is left out of both gets the mark `search`: cases beyond
those three, and long cases of the tests that `costly.txt` names, since they take several seconds each. Where this choice is not a good one, tests say so:
`@pytest.mark.every_case` keeps all cases, which take no time then; `@pytest.mark.one_case` keeps the first one, where
a case takes a second; `@pytest.mark.long` leaves out the test, and `only_quick` says which cases stand for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_CASES = 3  # beside the quick ones
_COSTLY = Path(__file__).with_name("costly.txt")  # `python -m tests.support.costly` writes it


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Mark as `long` the cases between those that stand for their test."""
    for cases in _by_test(items, lambda marks: marks.isdisjoint({"long", "every_case"})).values():
        candidates = [item for item in cases if not _is_compiled(item)] or cases
        candidates = [item for item in candidates if not any(item.iter_markers("search"))] or candidates
        last = 0 if any(cases[0].iter_markers("one_case")) else len(candidates) - 1
        chosen = [candidates[number] for number in (0, last)]
        for item in cases:
            if item not in chosen or any(item.iter_markers("search")):
                item.add_marker("long")


def mark_search(items: Sequence[pytest.Item]) -> None:
    """Mark as `search` the long cases beyond those, spread evenly, that `make test-all` runs of a test, and all costly ones."""
    costly = set(_COSTLY.read_text().split())
    for name, cases in _by_test(items, lambda marks: "long" in marks and "search" not in marks).items():
        num_kept = 0 if name in costly else min(_CASES, len(cases))
        kept = {number * len(cases) // num_kept for number in range(num_kept)}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker("search")


def _by_test(
    items: Sequence[pytest.Item], belongs: Callable[[set[str]], bool]
) -> dict[str, list[pytest.Item]]:
    """The cases of each test whose marks are such, by the name of the test."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if belongs({mark.name for mark in item.iter_markers()}):
            tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def only_quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values for `parametrize`: each chosen one is quick, and all others are for `make test-all`."""
    marks = {True: pytest.mark.every_case, False: pytest.mark.long}
    return [pytest.param(value, marks=marks[value in chosen]) for value in values]


def _is_compiled(item: pytest.Item) -> bool:
    cases = getattr(item, "callspec", None)
    return cases is not None and any(
        value == "inductor" for value in cases.params.values() if isinstance(value, str)
    )
