"""What code of a step changes by ops and reads as numbers of Python, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monograph.capture.guards.sources.reach.memory import SharedMemory, Written
from monograph.capture.tensors.fakes import Inputs
from monograph.capture.tensors.readings import Readings
from monograph.ir.graph_signature import Argument
from monograph.ir.memory import changed_by, memory_root
from monograph.ir.meta import origin

_FREE = "a tensor that build() uses"


def written_so_far(readings: Readings) -> list[Written]:
    """The tensors from outside that the recorded ops of a trace change, each once."""
    tracer, inputs = readings.tracer, readings.inputs
    nodes = tracer.graph.find_nodes(op="placeholder")
    outside = dict(zip(nodes, _tensors(inputs, readings.leaves), strict=False))
    found: dict[int, Written] = {}
    for node in tracer.graph.nodes:
        for root in map(memory_root, changed_by(node)):
            path, tensor = outside.get(root, ("", None))
            if root.op == "get_attr":
                path, tensor = _FREE, inputs.free.get(id(getattr(tracer.root, str(root.target), None)))
            if tensor is not None:
                found.setdefault(id(tensor), Written(tensor, path, origin(node)))
    return list(found.values())


def check_shared_memory(memory: SharedMemory, inputs: Inputs) -> None:
    """Raise AliasError for what is changed in one of these ways and read in the other."""
    memory.check([*inputs.tensors().items(), *((_FREE, tensor) for tensor in inputs.free.values())])


def _tensors(inputs: Inputs, given: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for item in inputs.items:
        real = given[item.source.index] if isinstance(item.source, Argument) else item.real
        yield item.path, real if isinstance(real, torch.Tensor) else None
