"""Two sides of a step compared: bit for bit, in units in the last place, and by their distance to float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.compiler import Build
from monograph.numerics.float64 import Float64Walk
from monograph.numerics.judge import FAULT, Difference, FloatReport, against_float64, differences
from monograph.numerics.state import KINDS, After


@dataclass(frozen=True)
class Compared:
    """One result or state tensor: how the graph's differs from eager's, if it does."""

    step: int
    kind: str
    path: str
    difference: Difference | None
    ulp: float | None = None  # the largest distance in units in the last place of eager's value
    eager_error: float | None = None  # the largest, against float64
    graph_error: float | None = None

    @property
    def same(self) -> bool:
        """True for equal bits."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.path}: the same bits"
        parts = [str(self.difference)]
        parts += [f"{self.ulp:.3g} ulp at most"] if self.ulp is not None else []
        if self.eager_error is not None:
            parts.append(
                f"against float64 eager errs by {self.eager_error:.3g}, the graph by {self.graph_error:.3g}"
            )
        return ", ".join(parts)


def compare(
    step: int, eager: After, graph: After, truths: Sequence[Mapping[str, Any]]
) -> tuple[list[Compared], dict[str, FloatReport]]:
    """Each result and state tensor, and with float64 values the verdict on each kind.

    `truths` are those values by path, the exact ones first and then those nearby; empty where bits are asked for.
    """
    exact = truths[0] if truths else {}
    return list(_compared(step, eager, graph, exact)), _judged(eager, graph, truths) if truths else {}


def is_fine(compared: Sequence[Compared], verdict: Mapping[str, FloatReport]) -> bool:
    """What has a float64 value is judged by it; all else has eager's bits."""
    strict = (item.same for item in compared if item.graph_error is None)
    return all(strict) and all(report.ok_for_one_step for report in verdict.values())


def _compared(step: int, eager: After, graph: After, truth: Mapping[str, Any]) -> Iterator[Compared]:
    for kind in KINDS:
        for path in dict.fromkeys((*eager[kind], *graph[kind])):
            expected, got = eager[kind].get(path, "nothing"), graph[kind].get(path, "nothing")
            found = next(differences(expected, got, path), None)
            if found is None or not _floating(expected, got):
                yield Compared(step, kind, path, found)
                continue
            errors: list[float] = []
            if isinstance(truth.get(path), torch.Tensor):
                errors = [_error(side, truth[path]) for side in (expected, got)]
            yield Compared(step, kind, path, found, _ulp(expected, got), *errors)


def _floating(expected: Any, got: Any) -> bool:
    both = isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)
    return both and expected.is_floating_point() and expected.shape == got.shape and bool(expected.numel())


def _error(side: torch.Tensor, exact: torch.Tensor) -> float:
    return float((side.double() - exact.double()).abs().max())


def _ulp(expected: torch.Tensor, got: torch.Tensor) -> float:
    limits = torch.finfo(expected.dtype)
    unit = (expected.double().abs() * limits.eps).clamp_min(limits.tiny * limits.eps)
    return float(((got.double() - expected.double()).abs() / unit).nan_to_num(torch.inf).max())


def _judged(eager: After, graph: After, truths: Sequence[Mapping[str, Any]]) -> dict[str, FloatReport]:
    """The distances to float64 of each kind."""
    verdict = {}
    for kind in KINDS:
        paths = [
            path
            for path, item in eager[kind].items()
            if isinstance(truths[0].get(path), torch.Tensor) and _floating(item, graph[kind].get(path))
        ]
        sides = [{path: values[path] for path in paths} for values in (*truths, eager[kind], graph[kind])]
        exact, *nearby, one, other = sides
        verdict[kind] = against_float64(exact, one, other, nearby)
    return verdict


def same_bits_of(_name: str, expected: Any, got: Any) -> bool:
    """Judges a value that may not round."""
    return next(differences(expected, got), None) is None


def near_float64(build: Build, inputs: Sequence[Any], *, mutual: bool) -> Callable[[str, Any, Any], bool]:
    """Judges a value of the captured program by its distance to float64; others need the same bits.

    A value on the way may err more than the promise for results allows: a kernel that sums in another order is not to
    blame for a fault, and a fault is larger by far. With `mutual` what is expected is judged, too.
    """
    walk = Float64Walk(build.stages[0].program, inputs)
    outputs = walk.run()
    exact = {node.name: item for node, item in walk.values.items()}
    exact |= dict(zip((port.path for port in walk.program.outputs), outputs, strict=True))

    def agrees(name: str, expected: Any, got: Any) -> bool:
        truth = exact.get(name)
        if not _floating(expected, got) or not isinstance(truth, torch.Tensor) or truth.shape != got.shape:
            return not _floating(expected, expected) or _close(expected, got)
        report = against_float64({name: truth}, {name: expected}, {name: got})
        (distance,) = report.distances
        near = report.graph_rms <= FAULT * max(report.eager_rms, report.rounding_rms)
        near = near and (report.eager_ok or not mutual)
        return near and distance.graph_max <= FAULT * distance.limit

    return agrees


def _close(expected: Any, got: Any) -> bool:
    if not _floating(expected, got):
        return True
    return torch.allclose(got.double(), expected.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
