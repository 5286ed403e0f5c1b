"""Calls of compiled updates: all parts of a step, sorted by kind, as one function of their tensors and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from struct import pack_into
from typing import Any

import torch
from torch import fx

from monograph.compat.global_state import denormals_count
from monograph.compat.modes import (
    hidden_from_dispatch_modes,
    num_dispatch_modes,
    outside_of_function_modes,
    profiler_is_on,
)
from monograph.elementwise.kinds import Item, Kind
from monograph.ir.meta import output_nodes
from monograph.ir.program import Program

Run = Callable[[Sequence[Any]], Sequence[Any]]
_MOST_REFUSALS = 8  # steps in a row whose numbers Python has to compute, before the updates are left to it
_ADDRESS = torch.Tensor.data_ptr
_PIECE = 8192  # elements of a loop for one thread
_BLOCK = 65536  # elements between two calls of eager's kernels: they stay in the nearest caches


@dataclass(frozen=True)
class Group:
    """The parts of one kind in a step, and their code."""

    kind: Kind
    items: tuple[Item, ...]
    library: ctypes.CDLL


class CompiledUpdate:
    """The update of parts of one kind: `prepared` looks at the numbers and gives False if Python has to, `run` writes."""

    def __init__(self, group: Group) -> None:
        kind, items = group.kind, group.items
        self.tensors = tuple(node for item in items for node in item.slots)
        self.numbers = tuple(dict.fromkeys(node for item in items for node in item.given))
        places = {node: index for index, node in enumerate(self.numbers)}
        inputs = [
            node.op == "placeholder" and node not in item.part.writes.values()
            for item in items
            for node in item.slots
        ]
        self._inputs = [index for index, is_input in enumerate(inputs) if is_input]
        self._count = ctypes.c_long(len(items))
        self._pointers = (ctypes.c_void_p * len(self.tensors))()
        self._given = (ctypes.c_double * max(len(self.numbers), 1))()
        self._pointer_format, self._number_format = f"{len(self.tensors)}P", f"{len(self.numbers)}d"
        which = [places[node] for item in items for node in item.given]
        self._which = (ctypes.c_long * max(len(which), 1))(*which)
        self._made = (ctypes.c_double * max(len(items) * kind.num_made, 1))()
        self._arguments = (self._pointers, self._given, self._which, self._made)
        self._lay_out(kind, [item.size for item in items])
        self._numbers, self._singles = group.library.numbers, group.library.singles
        self._stages = [getattr(group.library, f"stage{level}") for level in range(len(kind.calls) + 1)]
        self._calls = self._bound_calls(kind)

    def _lay_out(self, kind: Kind, sizes: Sequence[int]) -> None:
        """Cut all elements into pieces, and these into blocks for which buffers are large enough."""
        alone = not denormals_count()  # other threads would not flush denormal numbers
        most = _BLOCK * torch.get_num_threads() if kind.calls else 1 << 62
        most = _PIECE if alone else most
        pieces: list[int] = []
        blocks: list[tuple[int, int]] = []
        first, place = 0, 0
        for item, size in enumerate(sizes):
            for start in range(0, size, _PIECE):
                count = min(_PIECE, size - start)
                if place + count > most or (alone and place):
                    blocks.append((first, len(pieces) // 4))
                    first, place = len(pieces) // 4, 0
                pieces += (item, start, count, place)
                place += count
        blocks.append((first, len(pieces) // 4))
        self._pieces = (ctypes.c_long * len(pieces))(*pieces)
        self._blocks = [(ctypes.c_long(begin), ctypes.c_long(end)) for begin, end in blocks]
        self._length = min(most, sum(sizes))

    def _bound_calls(self, kind: Kind) -> list[list[tuple[Any, torch.Tensor]]]:
        """For each stage the ops that come after it, each with its buffer, on which it works in place."""
        ops = [op for stage in kind.calls for op in stage]
        self._held = [torch.zeros(self._length, dtype=kind.dtype, device="cpu") for _ in ops]
        self._buffers = (ctypes.c_void_p * max(len(ops), 1))(*(item.data_ptr() for item in self._held))
        remaining = iter(zip(ops, self._held, strict=True))
        return [[next(remaining) for _ in stage] for stage in kind.calls]

    def prepared(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> bool:
        """Take the tensors and numbers of a step. False, and nothing is written, if Python has to compute its numbers."""
        pointers = tuple(map(_ADDRESS, tensors))
        if 0 in pointers or any(tensors[index].is_neg() for index in self._inputs):
            return False  # no memory at all, or other numbers in it
        pack_into(self._pointer_format, self._pointers, 0, *pointers)
        pack_into(self._number_format, self._given, 0, *numbers)
        return not self._numbers(self._count, *self._arguments)

    def run(self) -> None:
        """Write the new state."""
        *stages, last = self._stages
        pieces, arguments, buffers = self._pieces, self._arguments, self._buffers
        for first, end in self._blocks:
            for stage, calls in zip(stages, self._calls, strict=True):
                stage(first, end, pieces, *arguments, buffers)
                for call, buffer in calls:
                    call(buffer, out=buffer)
            last(first, end, pieces, *arguments, buffers)
        self._singles(self._count, *self._arguments)


@dataclass(frozen=True)
class OpByOp:
    """What runs without compiled code, where a step has any.

    `before` gives, for the inputs, the outputs of the step so far and then what the updates are given; `noted` is an error of it
    with the user's line. `plain` makes a function of the whole step, from inputs to outputs, and `alone` one of the updates from
    what they are given.
    """

    before: Callable[..., Sequence[Any]]
    noted: Callable[[Exception], Exception]
    plain: Callable[[], Run]
    alone: Callable[[], Run]


class UpdatedStep:
    """Runs a step: the ops before the updates, one by one, and then these."""

    def __init__(
        self,
        program: Program,
        updates: Sequence[CompiledUpdate],
        values: Sequence[fx.Node],
        into: Mapping[fx.Node, fx.Node],
        op_by_op: OpByOp,
    ) -> None:
        """`values` are what the updates are given, `into` is by new state the old one that it replaces."""
        outputs = output_nodes(program.graph)
        inputs = {node: place for place, node in enumerate(program.graph.find_nodes(op="placeholder"))}
        self._positions = [i for i, item in enumerate(outputs) if item in into]
        self.written = frozenset(self._positions)
        self._states = [inputs[into[outputs[position]]] for position in self._positions]
        places = {node: len(outputs) + index for index, node in enumerate(values)}
        self._num_outputs = len(outputs)
        self._updates = [
            (
                update,
                _items(map(places.__getitem__, update.tensors)),
                _items(map(places.__getitem__, update.numbers)),
            )
            for update in updates
        ]
        self._state_places = [places[into[outputs[position]]] for position in self._positions]
        self._op_by_op, self._before = op_by_op, op_by_op.before
        self._begun, self._refusals = False, 0

    def run(self, inputs: Sequence[Any]) -> Any:
        """All but the updates: the outputs so far, and what the updates are given."""
        if num_dispatch_modes() or profiler_is_on() or self._refusals > _MOST_REFUSALS:
            return _Plain(list(self._plain(inputs)), inputs)
        try:
            with outside_of_function_modes():
                return self._before(*inputs)
        except Exception as error:
            raise self._op_by_op.noted(error)  # noqa: B904  # it is the same error, or stands for it

    def update(self, values: Any) -> Sequence[Any]:
        """Write the new state, and give the outputs."""
        if isinstance(values, _Plain):
            return self._updated_by_plain(values)
        for update, tensors, numbers in self._updates:
            if not update.prepared(tensors(values), numbers(values)):
                return self._updated_by_python(values)
        self._begun, self._refusals = True, 0
        for update, _tensors, _numbers in self._updates:
            update.run()
        self._begun = False
        outputs: Sequence[Any] = values[: self._num_outputs]
        return outputs

    def has_begun(self) -> bool:
        """True if the state may have changed in a run that has just failed."""
        begun, self._begun = self._begun, False
        return begun

    # --- without compiled code -----------------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> Run:
        """The whole step op by op, state apart: somebody looks at the ops, or Python has to compute."""
        return self._op_by_op.plain()

    @cached_property
    def _alone(self) -> Run:
        return self._op_by_op.alone()

    def _updated_by_python(self, values: Sequence[Any]) -> Sequence[Any]:
        self._refusals += 1
        made = self._alone(values[self._num_outputs :])
        self._write([values[place] for place in self._state_places], made)
        return values[: self._num_outputs]

    def _updated_by_plain(self, made: _Plain) -> Sequence[Any]:
        outputs = made.outputs
        self._write([made.inputs[i] for i in self._states], [outputs[i] for i in self._positions])
        for position in self._positions:
            outputs[position] = None
        return outputs

    def _write(self, states: list[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        if not states:
            return  # there are chains alone
        self._begun = True
        with hidden_from_dispatch_modes():
            torch._foreach_copy_(states, list(new))
        self._begun = False


def _items(places: Iterable[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the items at these places out of a sequence."""
    first, *others = [*places, 0, 0]  # of a single one itemgetter would give no tuple
    found = itemgetter(first, *others)
    return lambda values: found(values)[:-2]


@dataclass(frozen=True)
class _Plain:
    """What a step gives that runs op by op, its new state apart."""

    outputs: list[Any]
    inputs: Sequence[Any]


def grouped(items: Sequence[Item]) -> dict[Kind, list[Item]]:
    """The parts by kind, in the order in which they come."""
    found: dict[Kind, list[Item]] = {}
    for item in items:
        found.setdefault(item.kind, []).append(item)
    return found
