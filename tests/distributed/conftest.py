"""What the cases of a module find wrong: those in its tables `QUICK`, `LONG` and `SWEEP` on two ranks, those in `FOUR` on four.

The cases of a table run together, once for all workers of a test run: a file that these share has what they found.
"""

from __future__ import annotations

import fcntl
import os
import pickle

import pytest

from tests.distributed.processes import on_ranks
from tests.distributed.training import Wrong, run_cases


def _found(
    request: pytest.FixtureRequest, temporary: pytest.TempPathFactory, table: str, ranks: int = 2
) -> Wrong:
    module = request.module.__name__
    folder = temporary.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"{module}.{table}"
    with file.with_suffix(f".{table}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(on_ranks(run_cases, module, table, ranks=ranks)))
    found: Wrong = pickle.loads(file.read_bytes())
    return found


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrong:
    return _found(request, tmp_path_factory, "QUICK")


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrong:
    return _found(request, tmp_path_factory, "LONG")


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrong:
    return _found(request, tmp_path_factory, "SWEEP")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrong:
    return _found(request, tmp_path_factory, "FOUR", ranks=4)
