"""Settings that all tests share, and a cache of compiled steps for the run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.choice import choose
from tests.support.garbage import collect_quickly
from tests.support.threads import set_threads

set_threads()
import_module("torch._inductor.compile_fx")  # many tests compile
import_module(
    "torch.testing._internal.common_utils"
)  # it loads a Hypothesis profile: that of the tests comes after
headers: Any = import_module("monograph.compat.inductor.headers")
headers._STEPS = 0  # in a run that compiles so many steps they pay from the first one of each cache on
collect_quickly()
# torch describes whole captures to a handler there, though nobody reads them
logging.getLogger("torch.__trace").handlers.clear()

pytest_plugins = ["monograph.testing.plugin"]


_CACHE = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--hypothesis-profile") is None:
        settings.register_profile("few", settings.get_profile("monograph"), max_examples=30)
        settings.load_profile("few")  # `make search` tries a thousand
    if "MONOGRAPH_CACHE_DIR" not in os.environ:  # the first process of the run: its workers inherit it
        config.stash[_CACHE] = folder = Path(tempfile.mkdtemp(prefix="monograph-cache-"))
        os.environ["MONOGRAPH_CACHE_DIR"] = str(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    choose(items)


def pytest_collection_finish() -> None:
    collect_quickly()  # what stands at the top of all test files is there now


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        collect_quickly()  # what the tests of a file left in caches


def pytest_unconfigure(config: pytest.Config) -> None:
    if (folder := config.stash.get(_CACHE, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        del os.environ["MONOGRAPH_CACHE_DIR"]
