"""Ratios of paired rounds, the best peers, and the roofline."""

from __future__ import annotations

import pytest

from benchmarks import analysis
from tests.benchmarks.reports import MACHINE, measured, report, result, rounds


def test_a_ratio_pairs_the_rounds() -> None:
    # the machine got slower in the middle: the ratio of medians would be 2.5
    theirs, ours = rounds(4, 40, 5), rounds(2, 20, 1)
    assert analysis.ratio(theirs, ours) == pytest.approx(2.0)


def test_a_ratio_counts_steps() -> None:
    assert analysis.ratio(rounds(3, steps=100), rounds(1.5, steps=7)) == pytest.approx(2.0)


def test_times_of_a_step() -> None:
    taken = rounds(3, 1, 2)
    assert analysis.step_seconds(taken) == pytest.approx(2e-3)
    assert analysis.cpu_seconds(taken) == pytest.approx(4e-3)
    assert analysis.fastest_seconds(taken) == pytest.approx(0.5e-3)
    assert analysis.fastest_round(taken) == pytest.approx(1e-3)


def test_the_best_peer_is_the_hardest_to_beat() -> None:
    ours = measured("monograph-aten", 2)
    found = result(measured("eager", 6), measured("compile", 4), measured("jax", 3), ours)
    assert analysis.ratio_to_best(found, ours, torch_only=True) == pytest.approx(2.0)
    assert analysis.ratio_to_best(found, ours, torch_only=False) == pytest.approx(1.5)
    best = analysis.best_peer(found, ours, torch_only=True)
    assert best is not None
    assert best.peer == "compile"


def test_our_own_backends_and_the_excluded_are_no_peers() -> None:
    ours = measured("monograph-aten", 2)
    others = (measured("monograph-inductor", 1), measured("compile", error="no compiler"))
    assert analysis.ratio_to_best(result(ours, *others), ours, torch_only=False) is None
    assert [one.peer for one in analysis.own(result(ours, *others))] == [
        "monograph-aten",
        "monograph-inductor",
    ]


def test_the_mean_over_workloads_is_geometric() -> None:
    first = result(measured("eager", 8), measured("monograph-aten", 1))
    second = result(measured("eager", 2), measured("monograph-aten", 1), name="gpt")
    unfinished = result(measured("eager", 2), measured("monograph-aten", error="it fell over"), name="lstm")
    whole = report(first, second, unfinished)
    assert analysis.mean_ratio(whole, "monograph-aten", torch_only=True) == pytest.approx(4.0)
    assert analysis.mean_ratio(whole, "monograph-inductor", torch_only=True) is None


def test_the_roofline_is_that_of_the_fastest_product() -> None:
    found = result(measured("eager", 4))
    assert analysis.roofline_seconds(found, MACHINE) == pytest.approx(1e-3)
    assert analysis.roofline_share(found, found.measured[0], MACHINE) == pytest.approx(0.25)
