"""The steps in float64, from the same state, and from weights that differ in their last place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.compiler import Build
from monograph.inspect.walk import own_inputs
from monograph.ir.port import Port, Role
from monograph.numerics.float64 import Float64Walk
from monograph.state.random import RandomState


@dataclass(frozen=True)
class Truth:
    """What a step gives in float64: new state by path, the leaves of what build() returns."""

    state: Mapping[str, Any]
    results: Sequence[Any]

    def by_path(self, result_paths: Sequence[str]) -> dict[str, Any]:
        """All of it by path."""
        return dict(self.state) | dict(zip(result_paths, self.results, strict=True))


@dataclass(frozen=True)
class _Step:
    build: Build
    inputs: Sequence[Any]
    random: RandomState


class Exact:
    """The first trajectory is exact; how far the others get from it is what any rounding may do."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._trajectories: list[list[Truth]] = []

    def record(self, build: Build, inputs: Sequence[Any]) -> None:
        """The next step begins like this. State of a later step is that of the trajectory."""
        given = list(inputs)
        if self._steps:
            ports = build.stages[0].program.inputs
            own = {port.path for port in self._steps[0].build.stages[0].program.outputs if _is_state(port)}
            given = [None if port.path in own else item for port, item in zip(ports, given, strict=True)]
        self._steps.append(_Step(build, own_inputs(given), RandomState.now(touched=True)))

    def truths(self, nearby: int) -> list[list[Truth]]:
        """For each step the exact result, and so many nearby."""
        if not self._steps:
            return []
        while len(self._trajectories) < 1 + nearby:
            self._trajectories.append(self._trajectory(len(self._trajectories)))
        return list(map(list, zip(*self._trajectories, strict=True)))

    def _trajectory(self, number: int) -> list[Truth]:
        found: list[Truth] = []
        for step in self._steps:
            program = step.build.stages[0].program
            state = found[-1].state if found else {}
            given = [
                state.get(port.path, item) for port, item in zip(program.inputs, step.inputs, strict=True)
            ]
            if number and not found:
                unit = torch.finfo(step.build.settings.amp or torch.float32).eps
                generator = torch.Generator().manual_seed(number)
                given = [
                    _moved(item, unit, generator) if port.role in (Role.PARAM, Role.BUFFER) else item
                    for port, item in zip(program.inputs, given, strict=True)
                ]
            walk = Float64Walk(program, given, keep=False, random=step.random)
            outputs = walk.run()
            ports = zip(walk.program.outputs, outputs, strict=True)
            new = {port.path: item for port, item in ports if _is_state(port)}
            results = [
                None if index is None else outputs[index]
                for index in step.build.executor.bound.output_of_each_result
            ]
            found.append(Truth(new, results))
        return found


def _is_state(port: Port) -> bool:
    return port.role is Role.STATE


def _moved(item: Any, unit: float, generator: torch.Generator) -> Any:
    """A weight with each element changed by up to a unit in the last place."""
    if not isinstance(item, torch.Tensor) or not item.is_floating_point():
        return item
    noise = 2 * torch.rand(item.shape, generator=generator, dtype=torch.float64) - 1
    return item.double() * (1 + unit * noise.to(item.device))
