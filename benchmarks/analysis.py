"""From rounds to numbers: medians, ratios of rounds that were taken in turn, and their means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.record import Machine, Measured, Report, Result, Round


def step_seconds(rounds: Sequence[Round]) -> float:
    """Wall seconds of a step, the median of the rounds."""
    return median(one.wall_seconds / one.steps for one in rounds)


def cpu_seconds(rounds: Sequence[Round]) -> float:
    """CPU seconds of a step over all threads, the median of the rounds."""
    return median(one.cpu_seconds / one.steps for one in rounds)


def fastest_seconds(rounds: Sequence[Round]) -> float:
    """The fastest single step."""
    return min(one.fastest_seconds for one in rounds)


def fastest_round(rounds: Sequence[Round]) -> float:
    """Wall seconds of a step in the fastest round; 0 if there was none."""
    return min((one.wall_seconds / one.steps for one in rounds), default=0.0)


def ratio(other: Sequence[Round], ours: Sequence[Round]) -> float:
    """How often we are as fast: the median of the ratios of rounds that were taken one after the other."""
    return median(
        (theirs.wall_seconds / theirs.steps) / (own.wall_seconds / own.steps)
        for theirs, own in zip(other, ours, strict=True)
    )


def finished(measured: Measured) -> bool:
    """True if the peer went through all rounds."""
    return measured.error is None and bool(measured.rounds)


def own(result: Result) -> list[Measured]:
    """Monograph's backends that finished."""
    return [measured for measured in result.measured if measured.is_own and finished(measured)]


def peers(result: Result, *, torch_only: bool = False) -> list[Measured]:
    """The others that finished."""
    return [
        measured
        for measured in result.measured
        if not measured.is_own and finished(measured) and (measured.is_torch or not torch_only)
    ]


def ratio_to_best(result: Result, ours: Measured, *, torch_only: bool) -> float | None:
    """The ratio to the peer that is hardest to beat; None without peers."""
    ratios = [ratio(peer.rounds, ours.rounds) for peer in peers(result, torch_only=torch_only)]
    return min(ratios, default=None)


def best_peer(result: Result, ours: Measured, *, torch_only: bool) -> Measured | None:
    """The peer that is hardest to beat."""
    found = peers(result, torch_only=torch_only)
    return min(found, key=lambda peer: ratio(peer.rounds, ours.rounds), default=None)


def gemm_speed(machine: Machine) -> float:
    """The best speed of large matrix products, however computed."""
    return max(machine.gemm_flops_per_second.values())


def roofline_seconds(result: Result, machine: Machine) -> float:
    """What the matrix products and convolutions of a step would take at the machine's best speed."""
    return result.flops / gemm_speed(machine)


def roofline_share(result: Result, measured: Measured, machine: Machine) -> float:
    """The share of a step that its matrix products would need at the machine's best speed."""
    return roofline_seconds(result, machine) / step_seconds(measured.rounds)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def mean_ratio(report: Report, name: str, *, torch_only: bool) -> float | None:
    """The geometric mean of a backend's ratios over the workloads that it finished."""
    ratios = [
        ratio_to_best(result, measured, torch_only=torch_only)
        for result in report.results
        for measured in own(result)
        if measured.peer == name
    ]
    return geometric_mean(value for value in ratios if value is not None)


def own_names(report: Report) -> list[str]:
    """Monograph's backends in the report."""
    return list(
        dict.fromkeys(
            measured.peer for result in report.results for measured in result.measured if measured.is_own
        )
    )


def relative_to(result: Result, name: str) -> Callable[[Measured], float | None]:
    """How much faster than the named peer each one is; None where one of the two did not finish."""
    base = next((m for m in result.measured if m.peer == name and finished(m)), None)
    return lambda m: ratio(base.rounds, m.rounds) if base is not None and finished(m) else None
