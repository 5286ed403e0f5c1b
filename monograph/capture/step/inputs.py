"""The inputs that a step begins with: state, numbers, arguments and gradients, in the order of the program's inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.accumulation.batches import check_no_state, micro_call
from monograph.capture.accumulation.gradients import MicroGradients, check_no_gradients
from monograph.capture.effects.python_objects.counters import Counters
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.optimizers.inputs import OptimizerInputs
from monograph.capture.optimizers.tracing import Declared
from monograph.capture.step.request import Request
from monograph.capture.tensors.fakes import Input, Inputs
from monograph.compat.distributed.fully_shard import ShardedModule, ShardedParameter
from monograph.compat.distributed.tensors import (
    is_sharded,
    local_of,
    part_of,
    put_local,
    rows_here,
    with_local,
)
from monograph.compat.fake_values import fake_values
from monograph.compat.fakes import fake_mode, make_fake
from monograph.compat.modes import current_tracer
from monograph.compat.traces.nodes import traced_node
from monograph.distributed.gather import Cast, gathered, kept_whole, mean_part, whole_of
from monograph.distributed.programs.begun import GATHER, TOGETHER
from monograph.distributed.programs.gather_again import AGAIN
from monograph.distributed.zero import parts_of_whole
from monograph.errors import AliasError, DistributedError
from monograph.ir.graph_signature import HeldGradient, Number
from monograph.ir.memory import Writes
from monograph.ir.meta import add_label, origin
from monograph.ir.port import Role, gradient_path
from monograph.state.averages import Average
from monograph.state.find import (
    Slot,
    average_slots,
    kept_parameters,
    module_slots,
    scaler_slots,
    tensor_paths,
)


class StepInputs:
    """Fakes and symbols for all that one step begins with. `numbers` are those in Python objects that move."""

    def __init__(
        self,
        request: Request,
        modules: Mapping[str, nn.Module],
        overlay: Overlay,
        numbers: Counters,
        declared: Mapping[str, list[Declared]],
        known_counters: frozenset[str],
        *,
        with_values: bool,
        still: frozenset[str],
    ) -> None:
        self.inputs = Inputs(fake_mode(), with_values, still)
        numbers.put(self.inputs, overlay)
        self.names = tensor_paths(modules)
        _enter(overlay, modules.values(), request.owned.scaler)
        self.slots = list(module_slots(modules, overlay.of))
        self._add_state(self.slots)
        parts = parts_of_whole(owned, request.settings) if (owned := request.owned).optimizers else {}
        for item in [item for item in self.inputs.items if id(item.real) in parts]:
            first = request.settings.zero is not None and request.settings.zero.stage == 1
            sums_whole = first and request.settings.accumulation_steps > 1
            self.inputs.show_part(item, parts[id(item.real)], sums_whole=sums_whole)
        self.wholes = RecordedWholes(self.inputs)
        self.optimizers = OptimizerInputs(
            self.inputs, self.names, declared, known_counters, {id(owner): owner for owner in request.waiting}
        )
        for registered in owned.optimizers:
            self.optimizers.add(registered)
        self._scaler_slots = list(scaler_slots(owned.scaler, overlay.of))
        self._add_state(self._scaler_slots)
        self._average_weights = {average.path: self._add_average(average) for average in owned.averages}
        steps = request.settings.accumulation_steps
        if steps > 1:
            check_no_state(request.call, self.inputs.by_real)
            check_no_gradients(owned, request.settings)
        self.call = micro_call(request.call, steps) if steps > 1 else request.call  # what build() gets
        self.leaves = self.inputs.add_arguments(self.call)
        whole = request.call.replicated
        self.micro = MicroGradients(self.inputs, self.slots, whole) if steps > 1 else None
        self._held_gradients = self._add_held_gradients(request)
        numbers.add_to(self.inputs)

    def values(self) -> Any:
        """Inside, ops compute real values besides if fakes carry them."""
        inputs = self.inputs
        values = fake_values(inputs.mode, infer_kernels=True, mended=inputs.mended)
        return values if inputs.with_values else nullcontext()

    def _add_state(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.inputs.add_state(slot)

    def _add_average(self, average: Average) -> Any:
        self._add_state(average_slots(average))
        return self.inputs.add_number(Number(average, "weight"), Role.HYPER, f"ema_weight/{average.path}")

    def _add_held_gradients(self, request: Request) -> list[tuple[Any, Any]]:
        """Gradients that are there already and are added to; gives pairs of fakes, parameter and gradient."""
        pairs = []
        owners: dict[int, str] = {}
        for parameter in kept_parameters(request.owned, request.settings):
            if parameter.grad is not None:
                name = self.names[id(parameter)]
                if (owner := owners.setdefault(id(parameter.grad), name)) != name:
                    raise AliasError(
                        f"{owner} and {name} have one tensor as their gradient",
                        hint="give each parameter a gradient of its own, or none",
                    )
                planned = self.inputs.without_data
                part = part_of(parameter.grad).detach()
                fake = make_fake(self.inputs.mode, part, planned=planned)
                self.inputs.add(fake, Role.GRAD, gradient_path(name), HeldGradient(parameter))
                shown = self.inputs.show_around(parameter.grad) if is_sharded(parameter.grad) else fake
                pairs.append((self.inputs.fake(parameter), shown))
        return pairs

    def show(self) -> None:
        """Let this thread find fakes in modules and in the scaler."""
        for slot in (*self.slots, *self._scaler_slots):
            slot.container[slot.key] = self.inputs.fake(slot.tensor)

    def show_gradients(self) -> None:
        """Let fakes have the gradients that are there already."""
        for parameter, gradient in self._held_gradients:
            parameter.grad = gradient

    def update_average(self, average: Average) -> None:
        """As after each step of the optimizers."""
        weights = [part_of(self.inputs.fake(item)) for item in average.weights.values()]
        parameters = list(map(self.inputs.port, average.parameters()))
        with torch.no_grad():
            torch._foreach_lerp_(weights, parameters, self._average_weights[average.path])


class RecordedWholes:
    """Parameters in parts become whole by ops of the trace, and what this process updates of a whole one is a view of that.

    What others have updated comes before the first read after that, or at the end.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.seen, self._inputs = inputs.fake, inputs
        self._kept = {id(item.real): item for item in inputs.parts()}
        self._writes: Writes
        self._gathered: list[tuple[ShardedParameter, torch.Tensor]] = []
        # whole gradients that wait for a later backward(), by id of the parameter
        self._waiting: dict[int, tuple[ShardedParameter, torch.Tensor]] = {}

    @property
    def kept(self) -> Collection[int]:
        """The ids of parameters that stay whole."""
        return self._kept

    def begin(self) -> None:
        """The trace begins."""
        self._writes = Writes(current_tracer().graph)
        for item in self._kept.values():
            whole = item.fake.detach()
            if _is_split(item):
                begin, end = rows_here(int(whole.shape[0]), item.part.device_mesh)
                whole = whole[begin:end]
            put_local(item.shown, whole)

    def share(self) -> None:
        """Each process gets what the others have updated."""
        if not (news := self._writes.news()):
            return
        with torch.no_grad():
            for item in self._kept.values():
                if _is_split(item) and traced_node(item.fake, current_tracer()) in news:
                    item.fake.detach().copy_(whole_of(local_of(item.shown).clone(), item.part))
        self._writes.news()  # which all have

    def changes(self, item: ShardedParameter) -> int:
        """How often the step has changed a parameter so far."""
        return self._changes(self._inputs.port(item.sharded))

    def _summed(self, item: ShardedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """What processes add of a gradient: all that waits, too; None if it waits itself."""
        _, before = self._waiting.pop(id(item.sharded), (item, None))
        total = gradient if before is None else before + gradient
        if item.leaves_copies_apart:
            raise DistributedError(
                f"set_requires_all_reduce(False) in build(), before the gradient of {self._path(item)} is there",
                hint="set_requires_gradient_sync(False) lets all wait for a later backward()",
            )
        if not item.waits:
            return total
        self._waiting[id(item.sharded)] = item, total
        return None

    def check(self) -> None:
        """Raise DistributedError for what would be lost: a gradient that still waits, and a change to what was gathered."""
        for item, _ in self._waiting.values():
            raise DistributedError(
                f"the gradient of {self._path(item)} waits at the end of the step: set_requires_gradient_sync(False) came last",
                hint="call set_requires_gradient_sync(True) before the last backward() of build(); "
                "micro-batches are a matter of config.set_gradient_accumulation_steps(n)",
            )
        for item, whole in self._gathered:
            if writes := self._writes_to(whole):
                raise DistributedError(
                    f"{self._path(item)} is changed in place while a module runs: processes have parts of it, and all of it "
                    "for that time alone",
                    where=origin(writes[0]),
                    hint="change it in build(), or train with enable_zero(stage=2) or enable_data_parallel()",
                )

    def _path(self, item: ShardedParameter) -> str:
        return self._inputs.by_fake[id(self.seen(item.sharded))].path

    def _changes(self, fake: torch.Tensor) -> int:
        return len(self._writes_to(fake))

    def _writes_to(self, tensor: torch.Tensor) -> Sequence[fx.Node]:
        node = traced_node(tensor, current_tracer())
        return () if node is None else self._writes.to(node)

    def whole(self, known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        """All of a parameter, as it is now."""
        if (there := self._kept.get(id(item.sharded))) is not None:
            self.share()
            return there.fake if there.sums_whole else kept_whole(there.shown, there.fake.detach())
        begun = len(nodes := current_tracer().graph.nodes)
        cast = Cast(known.parameter_type, known.gradient_type)
        whole = gathered(self.seen(item.sharded), item.inner, cast, partial(self._summed, item))
        self._gathered.append((item, part_of(whole)))
        if known.gathers_again:
            for node in islice(nodes, begun, None):
                for label in (AGAIN, TOGETHER)[: 1 + known.shares] if node.target is GATHER else ():
                    add_label(node, label)
        return whole

    def reduced_once(self, averaged: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """What becomes of sums over micro-batches: of those that are whole each process gets its part, others are `averaged`."""
        whole = {id(item.fake): item for item in self._kept.values() if item.sums_whole}

        def reduced(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            if (item := whole.get(id(parameter))) is None:
                return averaged(parameter, total)
            if item.shown.grad is None:
                with torch.no_grad():
                    part = mean_part(total, item.part)
                item.shown.grad = with_local(item.part, part, requires_grad=False)
            return total

        return reduced


def _is_split(item: Input) -> bool:
    return bool(item.part.placements[-1].is_shard())


def _enter(overlay: Overlay, modules: Iterable[nn.Module], scaler: Any) -> None:
    """Let this thread see copies of the attributes of modules and of the scaler."""
    for module in modules:
        overlay.enter(module)
    if scaler is not None and (seen := overlay.enter(scaler)) is not None:
        seen.update({name: table.copy() for name, table in seen.items() if isinstance(table, dict)})
