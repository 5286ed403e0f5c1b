"""The steps in float64, from the same state, and from weights that differ in their last place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.compiler import Build
from monograph.inspect.float64 import Float64Walk
from monograph.ir.port import Role

_NEARBY = 4


@dataclass(frozen=True)
class Truth:
    """What a step gives in float64: new state by path, the leaves of what build() returns."""

    state: Mapping[str, Any]
    results: Sequence[Any]

    def by_path(self, result_paths: Sequence[str]) -> dict[str, Any]:
        """All of it by path."""
        return dict(self.state) | dict(zip(result_paths, self.results, strict=True))


class Exact:
    """Goes on step by step. The first trajectory is exact; how far the others are from it is what any rounding may do."""

    def __init__(self) -> None:
        self._states: list[Mapping[str, Any]] = [{} for _ in range(1 + _NEARBY)]
        self._begun = False

    def step(self, build: Build, inputs: Sequence[Any]) -> list[Truth]:
        """The next step of each trajectory. `inputs` are those of the build, in memory of their own."""
        program = build.stages[0].program
        unit = torch.finfo(build.settings.amp or torch.float32).eps
        truths = []
        for number, state in enumerate(self._states):
            given = [state.get(port.path, item) for port, item in zip(program.inputs, inputs, strict=True)]
            if number and not self._begun:
                weights = [port.role in (Role.PARAM, Role.BUFFER) for port in program.inputs]
                generator = torch.Generator().manual_seed(number)
                given = [
                    _moved(item, unit, generator) if is_weight else item
                    for item, is_weight in zip(given, weights, strict=True)
                ]
            walk = Float64Walk(program, given, keep=False)
            outputs = walk.run()
            ports = zip(walk.program.outputs, outputs, strict=True)
            new = {port.path: item for port, item in ports if port.role is Role.STATE}
            results = [None if index is None else outputs[index] for index in build.executor.results]
            truths.append(Truth(new, results))
        self._states = [truth.state for truth in truths]
        self._begun = True
        return truths


def _moved(item: Any, unit: float, generator: torch.Generator) -> Any:
    """A weight with each element changed by up to a unit in the last place."""
    if not isinstance(item, torch.Tensor) or not item.is_floating_point():
        return item
    noise = 2 * torch.rand(item.shape, generator=generator, dtype=torch.float64) - 1
    return item.double() * (1 + unit * noise.to(item.device))
