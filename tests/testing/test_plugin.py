"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import hypothesis
import pytest

from tests.support.warm import run_script

CASES = """
import dataclasses
import torch
from torch import nn
from monograph.testing import AlignCase, Mode

def one_more(graph):
    def run(*args):
        returned = graph(*args)
        returned.result.data.add_(1.0)
        return returned
    return run

align_linear = AlignCase("linear", lambda: (nn.Linear(4, 2), torch.randn(3, 4)))
CASES = [
    AlignCase("softmax", lambda: (torch.softmax, torch.randn(3, 4), 1), {"modes": ("eager", "aten")}),
    AlignCase("wrong", lambda: (torch.sin, torch.rand(3)), {"modes": ("aten", Mode("one_more", one_more))}),
]
empty = []
"""

RANDOM = """
from hypothesis import given, strategies
seen = []

@given(strategies.integers(0, 10**9))
def test_random(number):
    seen.append(number)

class TestRandom:
    @given(strategies.integers(0, 10**9))
    def test_method(self, number):
        seen.append(number)

def test_shown():
    print("seen", sum(seen))
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    command = ["-m", "pytest", "-p", "monograph.testing.plugin", "-p", "no:cacheprovider", *options]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MONOGRAPH", "PYTEST"))}
    return run_script(command, cwd=folder, env=kept)


def test_cases_are_tests(tmp_path: Path) -> None:
    done = run(tmp_path, CASES, "-v", "--mg-repro", "scripts")
    passed = [line.split(" ")[0].split("::")[1] for line in done.stdout.splitlines() if " PASSED" in line]
    assert passed == [
        "align_linear[linear-aten]",
        "CASES[softmax-eager]",
        "CASES[softmax-aten]",
        "CASES[wrong-aten]",
    ]
    assert "1 failed, 4 passed" in done.stdout
    assert "sin in mode one_more: result[0]: expected" in done.stdout
    assert "Traceback" not in done.stdout
    assert [path.name for path in (tmp_path / "scripts").iterdir()] == ["align_sin_one_more.py"]


@pytest.mark.long
def test_the_seed_decides_the_data(tmp_path: Path) -> None:
    def argument(*options: str) -> str:
        done = run(tmp_path, CASES, "-k", "one_more", *options)
        return next(line for line in done.stdout.splitlines() if "argument" in line)

    first, again, other = argument(), argument("--mg-seed", "0"), argument("--mg-seed", "1")
    assert first == again != other


@pytest.mark.long
def test_the_seed_holds_for_hypothesis_too(tmp_path: Path) -> None:
    def shown(*options: str) -> str:
        done = run(tmp_path, RANDOM, "-s", "--hypothesis-profile", "monograph", *options)
        assert "3 passed" in done.stdout
        return done.stdout.partition("seen ")[2].split()[0]

    assert shown() == shown() != shown("--mg-seed", "3") == shown("--mg-seed", "3")


@pytest.mark.long
@pytest.mark.parametrize("profile", ["monograph-ci", "monograph-search"])
def test_profiles(profile: str, tmp_path: Path) -> None:
    assert "3 passed" in run(tmp_path, RANDOM, "--hypothesis-profile", profile).stdout


MISTAKES = """
import torch
from monograph.testing import AlignCase

DICT = {"sin": AlignCase("sin", lambda: (torch.sin, torch.rand(3)))}
NO_TUPLE = AlignCase("no tuple", lambda: torch.sin)
ZERO = AlignCase("zero", lambda: (torch.sin, torch.rand(3)), {"seed": 0})
"""


@pytest.mark.long
def test_mistakes_in_cases_are_told(tmp_path: Path) -> None:
    done = run(tmp_path, MISTAKES, "-v")
    assert "DICT[sin-aten] PASSED" in done.stdout
    assert "make of AlignCase 'no tuple' gives a tuple (target, *args)" in done.stdout


@pytest.mark.long
def test_mistakes_in_lists_of_cases_are_told(tmp_path: Path) -> None:
    mixed = MISTAKES + "MIXED = [ZERO, 3]"
    assert "MIXED holds AlignCases and something else" in run(tmp_path, mixed).stdout
    single = MISTAKES + "STRING = AlignCase('string', lambda: (torch.sin,), {'modes': 'aten'})"
    assert "modes is a sequence of modes: modes=['aten']" in run(tmp_path, single).stdout


def test_the_profile_of_these_tests_is_the_one_asked_for(pytestconfig: pytest.Config) -> None:
    """Whatever modules were imported: some of torch's load one of their own."""
    asked = pytestconfig.getoption("--hypothesis-profile") or "few"
    assert hypothesis.settings.get_current_profile_name() == asked
