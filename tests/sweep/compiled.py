"""The sweep with `inductor` as a mode: of each op one sample, forward and backward compiled as one step.

A compilation takes seconds, so an op has one: constants stand in the step, its arguments are tensors, and all calls
have one signature. The sample is the first that eager mode and the aten backend take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from monograph.graph import Graph
from monograph.testing import Mode
from tests.sweep.cases import SweepCase
from tests.sweep.outcomes import Outcome, outcome_of
from tests.sweep.samples import Sample, samples_of

_CALLS = 3  # of a step, each with values of its own
_REASON = re.compile(r"could not be used: (?:Inductor cannot compile (.+?): (\w+)|([^:]+))")


def outcome_of_step(case: SweepCase, *, backend: str = "inductor") -> Outcome:
    """What became of the step of an op, or of its first sample on aten if aten takes none of them."""
    refused = None
    for index, sample in enumerate(samples_of(case)):
        step = _step_of(case, index, sample)
        on_aten = outcome_of(_on("aten", step, []))
        if on_aten.passes:
            return _compiled(step, backend)
        refused = refused or on_aten
    assert refused is not None, f"{case.key} has no samples"
    return refused


def reason_of(note: str) -> str:
    """The op that could not be compiled, or what else kept a step on aten, from the note of a build."""
    found = _REASON.search(note)
    if found is None:
        return "unknown"
    op, error, told = found.groups()
    return f"{op} ({error})" if op else told


def _compiled(step: Sample, backend: str) -> Outcome:
    graphs: list[Graph] = []
    found = outcome_of(_on(backend, step, graphs), "aligned")
    if found.passes and not graphs:  # nothing in the result has a gradient
        step = replace(step, options={**step.options, "grad": False})
        found = outcome_of(_on(backend, step, graphs), "aligned")
    fallen = [build for graph in graphs for build in graph.builds if build.backend != backend]
    if found.passes and fallen:
        note = next(iter(fallen[0].notes), "")
        return Outcome(f"falls back: {reason_of(note)}", note)
    return found


def _on(backend: str, step: Sample, graphs: list[Graph]) -> Sample:
    """The step on a backend and nothing else; `graphs` gets its graphs."""

    def make(graph: Any) -> Any:
        if step.options["grad"] and graph.backward is None:
            return graph.eager  # the step with its backward holds this forward
        graph.config.backend(backend)
        graphs.append(graph)
        return graph

    mode = Mode(backend, make, bitwise=backend == "aten")
    return replace(step, options={**step.options, "modes": (mode,)})


def _step_of(case: SweepCase, index: int, sample: Sample) -> Sample:
    """The sample as a function of its tensors, called with several values of one signature."""
    leaves, form = tree_flatten((sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    function = sample.function

    def step(*tensors: torch.Tensor) -> Any:
        given = constants.copy()
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, kwargs = tree_unflatten(given, form)
        return function(*args, **kwargs)

    first = tuple(leaves[place] for place in places)
    more = [values for values in _others(case, index) if _alike(first, values) and _taken(step, values)]
    options = {"grad": sample.options["grad"], "calls": 1, "more": more}
    return Sample(step, first, {}, options, sample.fresh_memory)


def _others(case: SweepCase, index: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors of a sample as other random numbers make them."""
    for number in range(1, _CALLS):
        samples = samples_of(case, index + 1, number=number)
        if len(samples) > index:
            leaves, _ = tree_flatten((samples[index].args, samples[index].kwargs))
            yield tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _alike(first: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return list(map(_signature, first)) == list(map(_signature, other))


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, strides, tensor.dtype, tensor.layout, tensor.requires_grad


def _taken(step: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> bool:
    """True if eager mode takes the values; those of the constants may belong to others."""
    try:
        step(*(value.detach().clone() for value in values))
    except Exception:
        return False
    return True
