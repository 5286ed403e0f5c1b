"""What a traced step leaves behind besides its results: new state, re-assigned buffers, gradients, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph._torch import is_fake, is_symbolic
from monograph.capture.bindings import Argument, Assign, Copy, Gradient, OptimizerEntries, Result, Target
from monograph.capture.reads import Reads, is_plain
from monograph.capture.standins import Inputs
from monograph.capture.state import HeldOptimizer, Slot
from monograph.errors import CaptureError
from monograph.ir.port import Role, gradient_path
from monograph.ir.tree import LEAF, Tree, flatten


@dataclass(frozen=True)
class Extra:
    """An output that is not returned to the caller: its value in the trace, where it goes, and its path."""

    value: Any
    target: Target
    path: str


@dataclass
class Leftovers:
    """Collects outputs of a trace. Slots must be the places of module state before the trace."""

    inputs: Inputs
    modules: Mapping[str, nn.Module]
    slots: Sequence[Slot]
    keep_gradients: bool
    extras: list[Extra] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    result_tree: Tree = LEAF
    without_gradient: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._originals = {(id(slot.container), slot.key): (slot, slot.tensor) for slot in self.slots}
        self._attributes = {path: dict(module.__dict__) for path, module in self.modules.items()}

    # --- results ---------------------------------------------------------------------------------------------------

    def collect_results(self, returned: Any) -> list[Any]:
        """Classify what build() returned; gives the values that the program must compute."""
        leaves: list[Any] = []
        self.result_tree = flatten(returned, leaves)
        outputs: list[Any] = []
        positions: dict[int, int] = {}
        self.results = [self._result(leaf, outputs, positions) for leaf in leaves]
        return outputs

    def _result(self, leaf: Any, outputs: list[Any], positions: dict[int, int]) -> Result:
        if not isinstance(leaf, torch.Tensor) and not is_symbolic(leaf):
            return Result("fixed", value=leaf)
        item = self.inputs.by_stand_in.get(id(leaf))
        if item is not None and isinstance(item.source, Argument):
            return Result("argument", index=item.source.index)
        if isinstance(leaf, torch.Tensor):
            real = self.inputs.real_of(leaf)
            if real is not None or not is_fake(leaf):
                return Result("fixed", value=leaf if real is None else real)
        if id(leaf) not in positions:
            positions[id(leaf)] = len(outputs)
            outputs.append(leaf)
        needs_grad = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return Result("output", index=positions[id(leaf)], requires_grad=needs_grad)

    # --- modules ---------------------------------------------------------------------------------------------------

    def collect_modules(self) -> None:
        """Buffers and attributes that build() re-assigned, and tensors it put into new attributes."""
        for path, module in self.modules.items():
            for table in (module._parameters, module._buffers, module.__dict__):
                for name, value in list(table.items()):
                    if isinstance(value, torch.Tensor) and is_fake(value):
                        self._collect_tensor(f"{path}.{name}", table, name, value, module)
        for slot in self.slots:
            if not isinstance(slot.container.get(slot.key), torch.Tensor) and slot.role is not Role.CAPTURED:
                raise CaptureError(f"build() removes {slot.path}", hint="a static graph keeps its state")

    def _collect_tensor(
        self, path: str, table: dict[str, Any], name: str, value: torch.Tensor, module: nn.Module
    ) -> None:
        slot, real = self._originals.get((id(table), name), (None, None))
        if real is not None and self.inputs.by_real[id(real)] is value:
            return
        if table is module._parameters or (slot is None and table is module._buffers):
            raise CaptureError(
                f"build() replaces or registers {path}",
                hint="register parameters and buffers before the capture",
            )
        if real is not None and _fits(value, real):
            self.extras.append(Extra(value, Copy(real), path))
        elif table is module.__dict__:
            self.extras.append(Extra(value, Assign(table, name), path))
        elif real is not None:
            raise CaptureError(
                f"build() assigns to buffer {path} a tensor {tuple(value.shape)} {value.dtype}; "
                f"it holds {tuple(real.shape)} {real.dtype}",
                hint="a static graph keeps the shapes and dtypes of its state",
            )

    def plain_writes(self, reads: Reads) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes that build() set to plain values, to be kept; one that it read before is refused."""
        kept: list[tuple[dict[str, Any], str, Any]] = []
        for path, module in self.modules.items():
            for name, value in module.__dict__.items():
                old = self._attributes[path].get(name)
                if value is old or not is_plain(value) or isinstance(old, torch.Tensor):
                    continue
                if reads.was_read(module, name) and not (is_plain(old) and old == value):
                    raise CaptureError(
                        f"build() reads and changes the Python attribute {path}.{name} ({old!r} to {value!r}): "
                        "each step would differ",
                        hint="make it a buffer, self.register_buffer(name, torch.tensor(0)), and change it in place",
                    )
                kept.append((module.__dict__, name, value))
        return kept

    # --- optimizers --------------------------------------------------------------------------------------------------

    def collect_optimizer(
        self,
        held: HeldOptimizer,
        real_state: Any,
        names: Mapping[int, str],
        counters: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """New, re-assigned and counted entries of an optimizer's state."""
        for stand_in, entries in held.optimizer.state.items():
            owner = self.inputs.real_of(stand_in) if isinstance(stand_in, torch.Tensor) else stand_in
            path = f"{held.name}/{names.get(id(owner), owner if isinstance(owner, str) else '')}"
            before = real_state.get(owner, {})
            target = OptimizerEntries(held.optimizer, owner)
            for key, value in entries.items():
                self._collect_entry(
                    f"{path}/{key}", value, before.get(key), target, key, counters.get(id(before), {})
                )

    def _collect_entry(
        self, path: str, value: Any, old: Any, target: OptimizerEntries, key: str, numbers: Mapping[str, Any]
    ) -> None:
        if isinstance(value, torch.Tensor):
            if isinstance(old, torch.Tensor) and self.inputs.by_real.get(id(old)) is value:
                return
            fits = isinstance(old, torch.Tensor) and _fits(value, old)
            self.extras.append(Extra(value, Copy(old) if fits else Assign(target, key), path))
        elif is_symbolic(value):
            if numbers.get(key) is not value:
                self.extras.append(Extra(value, Assign(target, key), path))
        elif is_plain(value) and (key in numbers or old != value):
            self.extras.append(Extra(value, Assign(target, key), path))

    # --- gradients ---------------------------------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """Gradients that stay: of parameters if they are kept, of arguments always, as eager leaves them."""
        for item in self.inputs.items:
            gradient = item.stand_in.grad if isinstance(item.stand_in, torch.Tensor) else None
            if item.role is Role.PARAM:
                if gradient is None and item.real.requires_grad:
                    self.without_gradient.append(item.path)
                if self.keep_gradients and item.real.requires_grad:
                    self.extras.append(Extra(gradient, Gradient(item.real), gradient_path(item.path)))
            elif gradient is not None and isinstance(item.source, Argument):
                self.extras.append(
                    Extra(gradient, Gradient(None, item.source.index), gradient_path(item.path))
                )


def _fits(value: torch.Tensor, real: torch.Tensor) -> bool:
    return value.shape == real.shape and value.dtype == real.dtype and value.device == real.device
