"""Calls of compiled updates: parts of one kind, as one function of their tensors and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Any

import torch
from torch import fx

from monograph.compat.global_state import denormals_count
from monograph.elementwise.kinds import Item, Kind
from monograph.elementwise.parts import Part
from monograph.ir.meta import form

_ADDRESS = torch.Tensor.data_ptr
_PIECE = 8192  # elements of a loop for one thread
_BLOCK = 65536  # elements between two calls of eager's kernels: they stay in the nearest caches


class Update:
    """The update of a part as a function of what it reads: it gives the new state in memory of its own, op by op.

    `written` are the positions of the arguments that a compiled one writes over, one for each result; `item` is its code, once
    it is there.
    """

    makes_memory = True

    def __init__(self, part: Part, item: Item | None = None) -> None:
        self.part, self.item = part, item
        self.arguments = tuple(dict.fromkeys((*part.inputs, *part.writes.values())))
        self.written = tuple(self.arguments.index(state) for state in part.writes.values())
        self.__module__, self.__name__, self.__qualname__ = "monograph", "update", "update"

    @property
    def kind(self) -> Kind | None:
        """Updates of one kind can run in one call."""
        return None if self.item is None else self.item.kind

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        known = dict(zip(self.arguments, given, strict=True))
        for node in self.part.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(known[node] for node in self.part.writes)


@dataclass(frozen=True)
class Group:
    """The parts of one kind in a step that run in one call, and their code."""

    kind: Kind
    items: tuple[Item, ...]
    library: ctypes.CDLL


class CompiledUpdate:
    """The updates of parts of one kind, written into their state.

    `takes` gets the tensors that are `given`, before anything is written, and says whether compiled code can compute with them
    and with the numbers: those that the step is given, and what ops make that are `known` to run first. `run` gets all tensors,
    and writes.
    """

    def __init__(self, group: Group, known: Container[fx.Node] = ()) -> None:
        kind, items = group.kind, group.items
        self.tensors = tuple(node for item in items for node in item.slots)
        self.numbers = tuple(dict.fromkeys(node for item in items for node in item.given))
        early = [node.op == "placeholder" or node in known for node in self.tensors]
        self._given_places = [place for place, is_early in enumerate(early) if is_early]
        self.given = tuple(self.tensors[place] for place in self._given_places)
        written = {state for item in items for state in item.part.writes.values()}
        self._read = [place for place, node in enumerate(self.given) if node not in written]
        places = {node: index for index, node in enumerate(self.numbers)}
        singles = [node for node in self.tensors if (made := form(node)) is not None and not made.shape]
        self._has_singles = not set(singles) <= set(self.given)
        self._count = ctypes.c_long(len(items))
        self._pointers = (ctypes.c_void_p * len(self.tensors))()
        self._nothing = ctypes.create_string_buffer(16)  # what numbers are read from until it is there
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

    def takes(self, given: Sequence[torch.Tensor], numbers: Sequence[Any]) -> bool:
        """True if compiled code can compute with what a step is given."""
        addresses = [ctypes.addressof(self._nothing)] * len(self.tensors)
        for place, tensor in zip(self._given_places, given, strict=True):
            addresses[place] = _ADDRESS(tensor)
        if 0 in addresses or any(given[place].is_neg() for place in self._read):
            return False  # no memory at all, or other numbers in it
        pack_into(self._pointer_format, self._pointers, 0, *addresses)
        pack_into(self._number_format, self._given, 0, *numbers)
        return not self._numbers(self._count, *self._arguments)

    def run(self, *tensors: torch.Tensor) -> None:
        """Write the new state."""
        pack_into(self._pointer_format, self._pointers, 0, *map(_ADDRESS, tensors))
        if self._has_singles:
            self._numbers(self._count, *self._arguments)
        *stages, last = self._stages
        pieces, arguments, buffers = self._pieces, self._arguments, self._buffers
        for first, end in self._blocks:
            for stage, calls in zip(stages, self._calls, strict=True):
                stage(first, end, pieces, *arguments, buffers)
                for call, buffer in calls:
                    call(buffer, out=buffer)
            last(first, end, pieces, *arguments, buffers)
        self._singles(self._count, *self._arguments)


def grouped(items: Sequence[Item]) -> dict[Kind, list[Item]]:
    """The parts by kind, in the order in which they come."""
    found: dict[Kind, list[Item]] = {}
    for item in items:
        found.setdefault(item.kind, []).append(item)
    return found
