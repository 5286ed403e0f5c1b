"""Parameters and buffers of modules: those that build() re-assigns are written back, those that it takes away refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.state_outputs import StateOutput, fits
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.fakes import is_fake
from monograph.compat.modules import BUFFERS, PARAMETERS
from monograph.errors import CaptureError
from monograph.ir.call.sparse import is_sparse
from monograph.ir.graph_signature import Assign, Copy
from monograph.ir.port import Role
from monograph.state.find import Slot
from monograph.user_code.lines import Origin


class ModuleState:
    """The tensors of modules. Slots must be their places before the trace, as the trace sees them."""

    def __init__(
        self,
        inputs: Inputs,
        overlay: Overlay,
        slots: Sequence[Slot],
        line_of: Callable[[str], Origin | None],
    ) -> None:
        self.inputs, self.overlay, self.slots, self.line_of = inputs, overlay, slots, line_of
        self._originals = {(id(slot.container), slot.key): (slot, slot.tensor) for slot in slots}
        self._places = Counter(id(slot.tensor) for slot in slots)

    def places(self) -> dict[tuple[int, str], torch.Tensor]:
        """The tensors before the step, by the id of the dict where each is and its name there."""
        found = self._originals.values()
        return {(id(self.overlay.there(slot.container)), slot.key): tensor for slot, tensor in found}

    def collect(self, modules: Mapping[str, nn.Module], state_outputs: list[StateOutput]) -> None:
        """Buffers and attributes that build() re-assigned, and tensors it put into new attributes."""
        for path, module in modules.items():
            seen = self.overlay.attributes(module)
            for table in (seen[PARAMETERS], seen[BUFFERS], seen):
                for name, value in list(table.items()):
                    if isinstance(value, torch.Tensor) and is_fake(value):
                        found = self._output(f"{path}.{name}", table, name, value, seen)
                        state_outputs += [] if found is None else [found]
        for slot in self.slots:
            if not isinstance(slot.container.get(slot.key), torch.Tensor) and slot.role is not Role.CAPTURED:
                raise CaptureError(
                    f"build() removes {slot.path}",
                    where=self.line_of(slot.path),
                    hint="a static graph keeps its state",
                )

    def _output(
        self, path: str, table: dict[str, Any], name: str, value: torch.Tensor, seen: Mapping[str, Any]
    ) -> StateOutput | None:
        """What writes a tensor that the step leaves in a table; None if it was there before."""
        slot, real = self._originals.get((id(table), name), (None, None))
        if real is not None and self.inputs.by_real[id(real)] is value:
            return None
        if is_sparse(value):
            raise CaptureError(
                f"build() puts a sparse tensor into {path}, where it would stay after the step",
                where=self.line_of(path),
                hint="keep its values there, and put it together in each step: torch.sparse_coo_tensor()",
            )
        if table is seen[PARAMETERS] or (slot is None and table is seen[BUFFERS]):
            raise CaptureError(
                f"build() replaces or registers {path}",
                where=self.line_of(path),
                hint="register parameters and buffers before the capture",
            )
        there = self.overlay.there(table)
        tied = self._places[id(real)] > 1  # one tensor at two places, which hold different values from now on
        if real is not None and fits(value, real) and not tied:
            return StateOutput(value, Copy(real), path, OwnPlace(there, name, path))
        if table is seen or (tied and real is not None and fits(value, real)):
            known = real is not None and not tied  # of another shape: it takes the place of what is an input
            return StateOutput(value, Assign(there, name), f"{path}.next" if known else path)
        if real is not None:
            raise CaptureError(
                f"build() assigns to buffer {path} a tensor {tuple(value.shape)} {value.dtype}; "
                f"it holds {tuple(real.shape)} {real.dtype}",
                where=self.line_of(path),
                hint="a static graph keeps the shapes and dtypes of its state: make the buffer as large as it will ever be in "
                f"__init__(), and take a part of it in each step, {path.rpartition('.')[2]}[:size]; or hold it in a plain attribute, "
                "which may be replaced",
            )
        return None
