"""The pytest plugin: cases of `align` are tests, and one seed and one folder of scripts hold for the whole run.

To be named in the top `conftest.py`: `pytest_plugins = ["monograph.testing.plugin"]`, or with `pytest -p`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from monograph.testing import environment
from monograph.testing.align_case import AlignCase
from monograph.testing.alignment.report import AlignmentError
from monograph.testing.modes import Mode

try:
    import hypothesis
except ModuleNotFoundError:  # only random cases need it
    hypothesis = None  # type: ignore[assignment]

# the same cases in each run, and no time limits: a machine may be busy
PROFILES: dict[str, dict[str, Any]] = {
    "monograph": {"deadline": None, "derandomize": True},
    "monograph-ci": {"deadline": None, "derandomize": True, "print_blob": True, "database": None},
    "monograph-search": {"deadline": None, "max_examples": 1000, "print_blob": True},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("monograph", "alignment of graphs with eager mode")
    group.addoption(
        "--mg-seed",
        type=int,
        metavar="N",
        help="seed of the data of align cases and of random cases (default: 0, the profile's own)",
    )
    group.addoption(
        "--mg-repro",
        metavar="DIR",
        help="folder for the stand-alone scripts of failures (default: in the temp folder)",
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis looks up the profile of its own option
def pytest_configure(config: pytest.Config) -> None:
    """Pass the options on to `align`, wherever it is called, and register the profiles with Hypothesis."""
    seed, folder = config.getoption("--mg-seed"), config.getoption("--mg-repro")
    if seed is not None:
        os.environ[environment.SEED] = str(seed)
    if folder is not None:
        os.environ[environment.SCRIPTS] = os.path.abspath(folder)
    if hypothesis is not None:
        for name, options in PROFILES.items():
            hypothesis.settings.register_profile(name, **options)


def pytest_report_header(config: pytest.Config) -> str:
    """What decides the data of this run."""
    return f"monograph: seed {environment.seed()}, scripts of failures in {environment.script_folder()}"


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """An AlignCase at the top of a test file, or a list, tuple or dict of them, is a test for each mode."""
    held = list(obj.values()) if isinstance(obj, dict) else obj
    found = held if isinstance(held, (list, tuple)) else [held]
    cases = [case for case in found if isinstance(case, AlignCase)]
    if cases and len(cases) < len(found):
        raise collector.CollectError(f"{name} holds AlignCases and something else: none of it would be run")
    return list(_items(collector, name, cases)) if cases else None


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """A seed on the command line holds for tests of Hypothesis too."""
    seed = config.getoption("--mg-seed")
    if seed is None or hypothesis is None:
        return
    for item in items:
        test = getattr(item, "obj", None)
        if test is not None and hypothesis.is_hypothesis_test(test):
            hypothesis.seed(seed)(getattr(test, "__func__", test))


class AlignItem(pytest.Item):
    """One case in one mode."""

    def __init__(self, *, case: AlignCase, mode: str | Mode, **options: Any) -> None:
        super().__init__(**options)
        self.case, self.mode = case, mode

    def runtest(self) -> None:
        """Align."""
        self.case.run(self.mode)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """A failed alignment says all by itself; of the rest the traceback is of use."""
        if isinstance(excinfo.value, AlignmentError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The file, and what the case is called."""
        return self.path, None, self.name


def _items(collector: Any, name: str, cases: Sequence[AlignCase]) -> Iterator[pytest.Item]:
    seen: Counter[str] = Counter()
    for case in cases:
        for mode in case.modes:
            called = f"{name}[{case.name}-{mode if isinstance(mode, str) else mode.name}]"
            seen[called] += 1
            called = called if seen[called] == 1 else f"{called[:-1]}-{seen[called]}]"
            item: pytest.Item = AlignItem.from_parent(collector, name=called, case=case, mode=mode)
            yield item
