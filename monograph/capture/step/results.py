"""What a step gives: results, changes of its arguments, and new state, as outputs of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from monograph.capture.accumulation.gradients import MicroGradients
from monograph.capture.effects.arguments import NewContent
from monograph.capture.effects.side_effects import SideEffects
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.tensors.fakes import Inputs
from monograph.errors import CaptureError
from monograph.ir.call.sparse import is_sparse
from monograph.ir.graph_signature import ArgumentChanges, Between, Recorded
from monograph.ir.port import PROBES
from monograph.ir.probes import ProbeLog, numbered


class StepResults:
    """Collects it when a step has run; probes while it runs."""

    def __init__(
        self, inputs: Inputs, side_effects: SideEffects, probes: ProbeLog, micro: MicroGradients | None
    ) -> None:
        self._inputs, self._side_effects, self._log, self._micro = inputs, side_effects, probes, micro
        self._probes: dict[str, torch.Tensor] = {}
        self.argument_changes = ArgumentChanges()
        self.changes_arguments = False  # besides the values of tensors, for a micro-batch alone

    def record_probe(self, name: str, what: str, tensor: torch.Tensor) -> None:
        """To be given each probe."""
        self._probes[numbered(name, what, self._probes)] = tensor

    def kept_changes(self, changed: Sequence[NewContent]) -> Sequence[NewContent]:
        """What the step leaves in containers of its arguments; nothing for a micro-batch, which has its own."""
        if self._micro is None:
            return changed
        self.changes_arguments = bool(changed)
        return []

    def collect(
        self, returned: Any, changed: Sequence[NewContent], leaves: Sequence[Any], reads: Reads
    ) -> list[Any]:
        """The outputs of the graph: results, then new state. `leaves` are those of the arguments."""
        effects = self._side_effects
        effects.collect_modules()
        outputs = effects.collect_results(returned, changed, leaves)
        self.argument_changes = replace(self._inputs.changes(), refills=tuple(effects.refills))
        effects.collect_gradients()
        if self._micro is not None:
            self._collect_of_micro_batch(self._micro, reads)
        for path, tensor in self._probes.items():
            target = Recorded(self._log, path)
            effects.state_outputs.append(StateOutput(tensor, target, f"{PROBES}{path}"))
        return outputs

    def _collect_of_micro_batch(self, micro: MicroGradients, reads: Reads) -> None:
        micro.check_arguments()
        self._side_effects.check_micro_batches_alike(reads)
        self.changes_arguments |= bool(self.argument_changes)
        self.argument_changes = ArgumentChanges()
        parts = micro.parts()
        self._side_effects.state_outputs += [
            StateOutput(gradient, Between(), path) for path, gradient in parts
        ]


def check_dense(state_outputs: Iterable[StateOutput]) -> None:
    """Raise CaptureError for new state that is sparse."""
    for state_output in state_outputs:
        if is_sparse(state_output.value):
            raise CaptureError(
                f"the step leaves a sparse tensor in {state_output.path}",
                hint="keep a dense one: a graph writes dense tensors alone",
            )
