"""What the cases of a module find wrong: those in its tables `QUICK`, `LONG` and `SWEEP` on two ranks, those in `FOUR` on four."""

from __future__ import annotations

import pytest

from tests.distributed.processes import on_ranks
from tests.distributed.training import Wrong, run_cases


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest) -> Wrong:
    return on_ranks(run_cases, request.module.__name__, "QUICK")


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest) -> Wrong:
    return on_ranks(run_cases, request.module.__name__, "LONG")


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest) -> Wrong:
    return on_ranks(run_cases, request.module.__name__, "SWEEP")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Wrong:
    return on_ranks(run_cases, request.module.__name__, "FOUR", ranks=4)
