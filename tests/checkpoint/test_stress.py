"""A short run of the stress tests; each tells in its own file how to run it longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.stress import mutate_artifact, mutate_checkpoint
from tests.support import ROOT


@pytest.mark.long
def test_mutants_are_refused_or_the_same():
    outcomes = mutate_checkpoint.run(trials=500, seed=0)
    assert sum(outcomes.values()) == 500
    assert len(outcomes) > 12  # every kind of mutation had its turn


@pytest.mark.long
def test_spoilt_artifacts_are_refused_or_do_what_the_right_one_does():
    outcomes = mutate_artifact.run(trials=300, seed=0)
    assert sum(outcomes.values()) == 300
    assert len(outcomes) > 8  # every kind of mutation had its turn


@pytest.mark.long
def test_a_killed_training_leaves_a_whole_checkpoint():
    """In a process of its own, since it forks."""
    command = (sys.executable, "-m", "tests.stress.kill_during_save", "--trials", "30", "--stride", "7")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("at random times: 30 kills, ")
