"""What a failing @autotest test says, and that it shrinks and replays."""

# ruff: noqa: F403, F405  names by a star, as tests for AutoTest are written

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch as real_torch
from hypothesis.database import InMemoryExampleDatabase

from monograph.numerics.judge import same_bits
from monograph.testing import AlignmentError
from monograph.testing.dual import *
from monograph.testing.dual.excluded import EXCLUDED
from tests.support import ROOT
from tests.support.warm import run_script
from tests.testing.spoiled import spoiled

WRONG_FOR_MANY = spoiled(lambda result: result + 1 if result.numel() > 3 else result)


def failing() -> Any:
    @autotest(n=50, modes=(WRONG_FOR_MANY,))
    def check() -> Any:
        layer = torch.nn.Linear(2, random(1, 5), bias=random())
        x = random_tensor(ndim=2, dim0=random(1, 6), dim1=2)
        return layer(x)

    return check


def message(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_failure_tells_the_program_the_inputs_the_seed_and_the_difference() -> None:
    with pytest.raises(AlignmentError) as caught:
        failing()()
    said = message(caught.value)
    assert re.search(r"Linear in mode spoiled: result\[0, 0\]: expected .*, got", said)
    assert "torch.manual_seed(0)" in said
    assert re.search(r"m0 = torch\.nn\.Linear\(2, \d, bias=(True|False)\)", said)
    assert "x1 = build(TensorSpec((" in said
    assert "x2 = m0(x1)  # <- this call differs" in said
    assert "the call is at test_autotest_failures.py:" in said
    assert "its inputs:\n  x1: torch.float32 (" in said
    assert "@reproduce_failure(" in said


@pytest.mark.long
def test_the_smallest_case_is_told() -> None:
    with pytest.raises(AlignmentError) as caught:
        failing()()
    rows = re.search(r"TensorSpec\(\((\d), 2\)", message(caught.value))
    outputs = re.search(r"Linear\(2, (\d)", message(caught.value))
    assert rows is not None
    assert outputs is not None
    assert int(rows.group(1)) * int(outputs.group(1)) == 4
    assert "Draw 1 (seed): 0" in message(caught.value)


def test_the_printed_program_runs_with_plain_torch() -> None:
    last: list[real_torch.Tensor] = []

    @autotest(n=1)
    def check(test_case) -> Any:
        x = random_tensor(ndim=2, dim0=2, dim1=3)
        layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
        layer.train(random())
        y = layer(x)[:, None, ..., 0] - float("inf") + layer[0].weight.sum()
        values, _ = torch.sort(2 - y.abs().T, dim=0, descending=random())
        values[0] = choice_tensor([1, 2], 1)
        values.add_(torch.rand(2))
        last[:] = [values.pytorch.detach().clone()]
        test_case.fail("look at it")

    with pytest.raises(AssertionError) as caught:
        check()
    said = message(caught.value)
    program = re.search(r"the calls of this case:\n(.*?)its inputs:", said, re.DOTALL)
    assert program is not None
    scope: dict[str, Any] = {}
    exec("\n".join(line[2:] for line in program.group(1).splitlines()), scope)
    made = [item for item in scope.values() if isinstance(item, real_torch.Tensor)]
    assert any(same_bits(item, last[0]) for item in made)


@pytest.mark.long
def test_a_failure_replays_from_its_blob() -> None:
    with pytest.raises(AlignmentError) as caught:
        failing()()
    version, blob = re.search(r"@reproduce_failure\('(.*?)', (b'.*?')\)", message(caught.value)).groups()
    again = hypothesis.reproduce_failure(version, eval(blob))(failing())
    with pytest.raises(AlignmentError) as replayed:
        again()
    assert str(replayed.value) == str(caught.value)


def test_a_seed_decides_the_cases() -> None:
    def shapes(seed: int) -> list[Any]:
        found = []

        @hypothesis.seed(seed)
        @autotest(n=10, check_graph=False)
        def check() -> Any:
            x = random_tensor()
            found.append((tuple(x.shape), x.pytorch.sum().item()))
            return x * 1

        check()
        return found

    assert shapes(1) == shapes(1)
    assert shapes(1) != shapes(2)


def test_the_active_profile_says_whether_cases_are_the_same_each_time() -> None:
    def shapes() -> list[Any]:
        found = []

        @autotest(n=10, check_graph=False)
        def check() -> Any:
            x = random_tensor()
            found.append(tuple(x.shape))
            return x * 1

        check()
        return found

    assert shapes() == shapes()  # the profile of these tests is derandomised


@pytest.mark.long
def test_a_failure_is_kept_in_the_example_database() -> None:
    database = InMemoryExampleDatabase()
    seen = []
    mode = spoiled(lambda result: result + 1 if result.numel() > 1 else result)

    def run() -> None:
        @autotest(n=30, modes=(mode,))
        def check() -> Any:
            x = random_tensor(ndim=1, dim0=random(1, 6))
            seen.append(len(x))
            return x * 1

        with pytest.raises(AlignmentError):
            check()

    settings = hypothesis.settings(database=database, derandomize=False)
    active = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("with a database", settings)
    hypothesis.settings.load_profile("with a database")
    try:
        run()
        seen.clear()
        run()
    finally:
        hypothesis.settings.load_profile(active)
    assert seen[0] == 2  # the smallest failing case comes first


def test_each_excluded_name_has_a_cause() -> None:
    assert {"tensor", "train", "eval", "to", "manual_seed", "numpy", "item", "tolist"} <= set(EXCLUDED)
    assert all(cause.strip() and name == name.strip() for name, cause in EXCLUDED.items())
    with pytest.raises(TypeError):
        EXCLUDED["more"] = "cannot be added"  # type: ignore[index]


def test_the_docs_list_each_excluded_name_with_its_cause() -> None:
    page = (ROOT / "docs" / "autotest.md").read_text()
    for name, cause in EXCLUDED.items():
        assert any(f"`{name}`" in row and cause in row for row in page.splitlines()), name


def test_excluded_names_are_names_of_torch() -> None:
    places = (real_torch, real_torch.Tensor, real_torch.nn.Module, real_torch.nn)
    assert all(any(hasattr(place, name) for place in places) for name in EXCLUDED)


@pytest.mark.parametrize("name", ["random_placement", "random_sbp", "all_placement", "all_sbp", "globaltest"])
def test_what_makes_no_sense_here_is_absent(name: str) -> None:
    import monograph.testing.dual as module

    assert not hasattr(module, name)


def test_verbose_prints_the_graph_and_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @autotest(n=1)
    def check() -> Any:
        return torch.exp(random_tensor(ndim=1))

    check()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("MONOGRAPH_TEST_VERBOSE", "1")
    check()
    said = capsys.readouterr().out
    assert "aten.exp" in said
    assert "results" in said
    assert "check: 1 cases passed, PyTorch refused 0" in said


def test_pytest_and_unittest_run_a_file_of_tests(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import unittest\n"
        "from monograph.testing.dual import *\n"
        "class TestIt(unittest.TestCase):\n"
        "    @autotest(n=1)\n"
        "    def test_good(test_case):\n"
        "        return random_tensor() * 2\n"
        "    @autotest(n=1)\n"
        "    def test_bad(test_case):\n"
        "        test_case.fail()\n"
    )
    for runner, good in (("pytest", "1 failed, 1 passed"), ("unittest", "FAILED (failures=1)")):
        done = run_script(["-m", runner, "test_it.py"], cwd=tmp_path, env=os.environ)
        assert good in done.stdout + done.stderr


@pytest.mark.long
def test_without_hypothesis_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    lines = [
        "import sys, importlib.util",
        "found = importlib.util.find_spec",
        "importlib.util.find_spec = lambda name, *a: None if name == 'hypothesis' else found(name, *a)",
        "import monograph, monograph.testing",
        "assert not any(name.split('.')[0] == 'hypothesis' for name in sys.modules)",
        "for part in ('dual', 'strategies'):",
        "    try:",
        "        importlib.import_module('monograph.testing.' + part)",
        "    except ModuleNotFoundError as error:",
        "        print(error)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("pip install 'monograph[testing]'") == 2, done.stderr


class TestSkipped(unittest.TestCase):
    def test_a_skip_inside_is_a_skip(self) -> None:
        @autotest(n=1)
        def check(test_case) -> None:
            test_case.skipTest("not today")

        with pytest.raises(unittest.SkipTest, match="not today"):
            check()
