"""The sweep of compiled steps: a step that passes, one that falls back, a compiler that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monograph import backends
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.errors import BackendError
from tests.support import new_cache
from tests.sweep.cases import SweepCase
from tests.sweep.compiled import outcome_of_step
from tests.sweep.outcomes import Outcome
from tests.sweep.pool import run_cases
from tests.sweep.sweeps import INDUCTOR, implied, ops

ATAN = SweepCase("op_db", "atan", "backward")


@pytest.mark.long
def test_a_step_is_compiled_once_and_aligned(tmp_path: Path) -> None:
    sweep = replace(INDUCTOR, folder=tmp_path)
    new_cache(tmp_path / "cache")
    (result,) = run_cases([ATAN], most=1, workers=1, folder=tmp_path, sweep=sweep)
    assert (result.outcomes, result.messages) == (["aligned"], {})
    assert len(list(tmp_path.glob("cache/steps/*/step.so"))) == 1


@pytest.mark.long
def test_a_step_that_falls_back_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(order: LoweringRequest) -> LoweredProgram:
        raise BackendError("Inductor cannot compile aten.atan.default: LoweringException: no such kernel")

    monkeypatch.setitem(backends.LOWER, "inductor", refusing)
    assert outcome_of_step(ATAN).shows == "falls back: aten.atan.default (LoweringException)"


@pytest.mark.one_case
@pytest.mark.parametrize(("wrong_from", "shows"), [(0, "differs"), (1, "differs"), (9, "aligned")])
def test_a_compiler_that_is_wrong_is_caught(
    wrong_from: int, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thousandth in the result, in its gradient, nowhere."""

    def wrong(order: LoweringRequest) -> LoweredProgram:
        lowered = backends.aten.lower(order)

        def off(inputs: list[Any]) -> Sequence[Any]:
            results = list(lowered.runner.run(inputs))
            return [*results[:wrong_from], *(item * 1.001 for item in results[wrong_from:])]

        return replace(lowered, backend="inductor", runner=replace(lowered.runner, run=off))

    monkeypatch.setitem(backends.LOWER, "inductor", wrong)
    assert outcome_of_step(ATAN).shows == shows


@pytest.mark.long
def test_a_case_that_aten_refuses_is_refused() -> None:
    assert outcome_of_step(SweepCase("op_db", "unique", "forward")).shows == "refused: DataDependentError"


def test_a_forward_follows_from_a_step_that_passed() -> None:
    forward = SweepCase("op_db", "atan", "forward")
    assert list(implied((ATAN, forward), {ATAN.key})) == [forward]
    assert list(implied((ATAN, forward), set())) == []
    assert len(ops()) > 1000
    assert not Outcome("falls back: aten.atan.default").passes
