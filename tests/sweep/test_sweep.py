"""The fast part of the sweep, the rules of its expectations, and the faults of torch that they stand on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.sweep import table
from tests.sweep.cases import SweepCase, all_cases, case_of, fast_cases
from tests.sweep.expectations import UPSTREAM, Expectations, read, unexpected, unknown_cases
from tests.sweep.pool import Result, Worker, run_cases
from tests.sweep.run import Results
from tests.sweep.sweeps import INDUCTOR, SPECIAL, SWEEPS

EXPECTED = read()
COMPILED = read(INDUCTOR)
ON_SPECIALS = read(SPECIAL)
SAMPLES = 2  # of each case
SCRIPTS = sorted(path.name for path in UPSTREAM.glob("*.py"))

pytestmark = pytest.mark.skipif(
    torch.__version__.split("+")[0] != EXPECTED.torch,
    reason=f"the expectations are those of torch {EXPECTED.torch}",
)


@pytest.mark.long
def test_the_fast_part_is_as_expected(tmp_path: Path) -> None:
    cases = fast_cases(EXPECTED.cases)
    results = list(run_cases(cases, most=SAMPLES, workers=2, folder=tmp_path))
    assert {result.case for result in results} == {case.key for case in cases}
    wrong = [finding for result in results for finding in unexpected(result, EXPECTED, most=SAMPLES)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_fault_of_torch_is_still_there(script: str) -> None:
    done = subprocess.run(
        [sys.executable, UPSTREAM / script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{script} does not show its fault any more:\n{done.stdout}{done.stderr}"
    assert "monograph" not in (UPSTREAM / script).read_text()


def test_each_script_belongs_to_a_cause() -> None:
    causes = [cause for expected in (EXPECTED, COMPILED, ON_SPECIALS) for cause in expected.causes.values()]
    assert set(SCRIPTS) == {cause.script for cause in causes if cause.script}


@pytest.mark.parametrize("expected", [EXPECTED, COMPILED, ON_SPECIALS], ids=list(SWEEPS))
def test_rows_name_cases_that_exist(expected: Expectations) -> None:
    assert unknown_cases(expected, (case.key for case in expected.sweep.cases())) == []


@pytest.mark.parametrize("expected", [EXPECTED, COMPILED, ON_SPECIALS], ids=list(SWEEPS))
def test_the_page_of_the_docs_is_in_step(expected: Expectations) -> None:
    assert expected.sweep.page.read_text() == table.page(expected), "run python -m tests.sweep.table"


# --- the sweep itself ------------------------------------------------------------------------------------------------


def expectations(**rows: str) -> Expectations:
    """Rows of one sample each."""
    lines = [
        f'"{case.replace("_", "/")}" = [{{ cause = "it", shows = "{shows}", samples = [1] }}]'
        for case, shows in rows.items()
    ]
    text = 'torch = "0"\n[samples]\n[cause.it]\nkind = "undefined"\nwhy = "it is so"\n[rows]\n'
    return read(text=text + "\n".join(lines))


@pytest.mark.parametrize(
    ("outcomes", "findings"),
    [
        (["bitwise", "differs"], []),
        (["bitwise", "bitwise"], ["a/b/c, sample 1: expected differs, got bitwise"]),
        (["differs", "differs"], ["a/b/c, sample 0: expected bitwise, got differs"]),
        (["bitwise", "crash: SIGSEGV"], ["a/b/c, sample 1: expected differs, got crash: SIGSEGV"]),
        (["bitwise"], ["a/b/c: a row names sample 1, there are 1"]),
    ],
)
def test_what_is_not_as_expected_is_told(outcomes: list[str], findings: list[str]) -> None:
    assert unexpected(Result("a/b/c", outcomes), expectations(a_b_c="differs")) == findings


def test_an_outcome_must_fit_its_cause() -> None:
    with pytest.raises(AssertionError, match="cannot come from it"):
        expectations(a_b_c="crash: SIGSEGV")


FAULTY_WORKER = """
import json, os, signal, sys, time

def tell(**line):
    print(json.dumps(line), flush=True)

tell(ready=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["case"].startswith("never"):
        os.kill(os.getpid(), signal.SIGSEGV)
    for index in range(request["first"], request["most"]):
        tell(begins=index)
        if index == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == 2:
            time.sleep(60)
        tell(sample=index, outcome="bitwise", message="")
    tell(done=True)
"""


def test_a_crash_and_a_hang_are_outcomes_of_their_samples(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "log", command=(sys.executable, "-c", FAULTY_WORKER), seconds=1.0)
    result = worker.run(SweepCase("any", "case", "part"), most=4)
    assert result.outcomes == ["bitwise", "crash: SIGSEGV", "hangs", "bitwise"]
    assert worker.run(SweepCase("never", "makes", "samples"), most=4).outcomes == ["crash: SIGSEGV"]
    worker.close()


def test_a_sweep_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, digest="one").add(Result("a/b/c", ["bitwise"]))
    with path.open("a") as file:
        file.write('{"case": "d/e/f", "outco')
    again = Results(path, digest="one")
    assert list(again.found) == ["a/b/c"]
    again.add(Result("d/e/f", ["differs"]))
    assert list(Results(path, digest="one").found) == ["a/b/c", "d/e/f"]
    assert Results(path, digest="another").found == {}


def test_keys_lead_back_to_cases() -> None:
    assert all(case_of(case.key) == case for case in all_cases())
    assert case_of("optim_db/SGD/weight_decay w/ momentum") == SweepCase(
        "optim_db", "SGD", "weight_decay w/ momentum"
    )
