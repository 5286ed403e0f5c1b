"""What the cases of a module find wrong on two ranks: those in its table `QUICK`, and those in `LONG`."""

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
