"""Steps of the `inductor` backend in a loop of C, which is compiled and loaded when it is first asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph.backends.flat import Flat
from monograph.compat.inductor.disk_cache import Entry
from monograph.compat.inductor.repeated_runs import CODE, Form, RepeatedRuns
from monograph.elementwise.compiling import compiled
from monograph.errors import BackendError
from monograph.ir.meta import TensorMeta, output_nodes, value
from monograph.ir.program import Program
from monograph.runtime.runner import Repeated

LOGGER = logging.getLogger("monograph")


def can_be_repeated(program: Program, flat: Flat, entry: Entry) -> bool:
    """True if nothing is to be done in Python between two runs of a library, which says when it begins to write."""
    on_cpu = all(item.device.type == "cpu" for item in flat.inputs)
    outputs = [value(item) for item in output_nodes(program.graph) if isinstance(item, fx.Node)]
    is_told = flat.is_flagged or not flat.written
    only_tensors = flat.views is None and all(isinstance(item, TensorMeta) for item in outputs)
    return on_cpu and is_told and only_tensors and not entry.calls_python_ops


class Repeating:
    """Readies runs of one library."""

    def __init__(self, library: Path, program: Program, flat: Flat) -> None:
        self._library, self._is_flagged = library, flat.is_flagged
        outputs = output_nodes(program.graph)
        forms: dict[int, Any] = {index: value(outputs[position]) for position, index in flat.returned}
        self._results = [Form(forms[index].shape, forms[index].dtype) for index in sorted(forms)]
        self._runs: RepeatedRuns | None = None
        self._is_tried = False

    def __call__(self, inputs: Sequence[Any], stacks: Mapping[int, torch.Tensor]) -> Repeated | None:
        """Runs with these inputs; None where there is no such loop. If it is flagged, the library writes into the last first."""
        if not self._is_tried:
            self._runs, self._is_tried = self._loaded(), True
        if self._runs is None:
            return None
        staying = [None if position in stacks else item for position, item in enumerate(inputs)]
        return self._runs.begin(staying, stacks, inputs[-1] if self._is_flagged else None)

    def _loaded(self) -> RepeatedRuns | None:
        try:
            (code,) = compiled([CODE])
        except BackendError as error:
            LOGGER.info("many() calls steps one by one: %s", error.message)
            return None
        return RepeatedRuns.of(self._library, code, self._results)
