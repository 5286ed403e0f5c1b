"""Memory that a step knows in two ways: tensors show it, and so do arrays and buffers of Python.

What a tensor reads there is read at each step. What Python reads there is a constant of the build, so that it is guarded
by value, and the step must not change it: Python code would find what was there before. So it is the other way round with
what Python code changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from monograph.capture.guards.sources.hidden import Probe, Reader, shows_memory
from monograph.capture.guards.sources.places import Closure, Entries, Source
from monograph.capture.guards.sources.reach.conversions import only_converts
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.values import same
from monograph.compat.modes import outside_of_modes, without_function_mode
from monograph.errors import AliasError
from monograph.state.spans import Regions, Span, span
from monograph.user_code.lines import Origin


@dataclass(frozen=True)
class Written:
    """A tensor from outside that code of the step changes: its path, and where."""

    tensor: torch.Tensor
    path: str
    where: Origin


class SharedMemory:
    """The arrays and buffers that a step has reached, and the tensors that it makes of them."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._looked = 0  # how many sources are known
        self._known: list[tuple[Probe, Span]] = []
        self._made: list[torch.Tensor] = []
        self.written: list[Written] = []  # what build() has changed by ops
        # what was there when a tensor was made of it, by id of the source
        self._contents: dict[int, list[Any]] = {}

    @property
    def is_known(self) -> bool:
        """True if code of the step could get at an array or a buffer."""
        self._look()
        return bool(self._known)

    def made(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """To be given each tensor that code makes of what it has; gives the one for this memory, None for memory of its own."""
        shown = self._shown_by(tensor)
        for source in shown:
            self._contents.setdefault(id(source), []).append(source.now())
        if not shown:
            return None
        known = next((item for item in self._made if _form(item) == _form(tensor)), None)
        if known is None:
            self._made.append(tensor)
        return tensor if known is None else known

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise AliasError if code of the step changes what it reads in the other way. `tensors` are all that it knows."""
        for item in self.written:
            for source in self._shown_by(item.tensor):
                if self._is_read(source):
                    raise AliasError(
                        f"build() changes {item.path}, and its Python code can read the same memory as {source.label}: it "
                        "would find there what was before the step",
                        where=item.where,
                        hint=f"read the tensor in place of {source.label}; torch.from_numpy({source.label}) reads nothing, "
                        "where it is written so",
                    )
        changed = self._changed()
        for path, tensor in tensors if changed else ():
            for source in [source for source in self._shown_by(tensor) if source in changed]:
                if not self._was_made_after(source, tensor):
                    raise AliasError(
                        f"Python code in build() changes {source.label}, and the step reads the same memory as {path}: its "
                        "ops run later, and would find other numbers",
                        hint=f"change the tensor, by ops, or change {source.label} before the call",
                    )
                source.reader = replace(source.reader, write=None)  # the ops find what is there now

    def guarded(
        self, sources: Sequence[Source], tensors: Iterable[torch.Tensor]
    ) -> tuple[list[Source], bool]:
        """The sources to be guarded; True if some of them share memory with `tensors`.

        What code only makes tensors of is guarded by its form: its numbers may be any.
        """
        state = Regions(_span(tensor) for tensor in tensors if _has_memory(tensor))
        found, is_shared = list[Source](), False
        for source in sources:
            memory = memory_of(source) if isinstance(source, Probe) else None
            shared = memory is not None and state.meet(*memory)
            is_shared |= shared
            if shared and isinstance(source, Probe) and not self._is_read(source):
                form = Probe(source.label, source.owner, _FORM)
                form.recorded = dict(form.now())
                found.append(form)
            else:
                found.append(source)
        return found, is_shared

    def _look(self) -> None:
        """Take in the sources that have come."""
        sources = self._reach.sources
        for source in sources[self._looked :]:
            if isinstance(source, Probe) and (memory := memory_of(source)) is not None:
                self._known.append((source, memory))
        self._looked = len(sources)

    def _shown_by(self, tensor: torch.Tensor) -> list[Probe]:
        self._look()
        if not self._known or not _has_memory(tensor):
            return []
        own = Regions([_span(tensor)])
        return [source for source, memory in self._known if own.meet(*memory)]

    def _is_read(self, source: Probe) -> bool:
        """False if all that code of the step does with it is to make tensors of it."""
        names = self._names_of(source.owner)
        codes = self._reach.own_codes()
        return names is None or not all(only_converts(code, name) for code in codes for name in names)

    def _names_of(self, item: Any) -> set[str] | None:
        """The attributes, globals and variables that an object is; None if it is in other places too, or in none."""
        names: set[str] = set()
        for source in self._reach.sources:
            keys = [key for key, value in source.recorded.items() if value is item]
            if not keys:
                continue
            if isinstance(source, Entries) and not source.whole:
                names.update(keys)
            elif isinstance(source, Closure) and "<closure>" in source.label:
                names.add(source.label.rpartition(".")[2])
            else:
                return None
        return names or None

    def _changed(self) -> list[Probe]:
        """What Python code has changed."""
        self._look()
        return [source for source, _ in self._known if not _same(source.recorded, source.now())]

    def _was_made_after(self, source: Probe, tensor: torch.Tensor) -> bool:
        """True if a tensor was made of it when it held what it holds now, and that will stay there."""
        contents = self._contents.get(id(source), ())
        is_made = any(item is tensor for item in self._made)
        return is_made and all(_same(item, source.now()) for item in contents)


def memory_of(source: Probe) -> Span | None:
    """The addresses of the numbers that an array or a buffer shows; None if it shows none."""
    if not shows_memory(source):
        return None
    try:
        array = source.owner if isinstance(source.owner, np.ndarray) else np.asarray(memoryview(source.owner))
    except (TypeError, ValueError, BufferError):  # released, or of a type that numpy does not know
        return None
    if array.dtype.hasobject or not array.size:
        return None
    start = end = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        start += min(0, (size - 1) * stride)
        end += max(0, (size - 1) * stride)
    return start, end + array.itemsize


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _same(before: Any, now: Any) -> bool:
    return before.keys() == now.keys() and all(same(before[key], now[key]) for key in before)


def _span(tensor: torch.Tensor) -> Span:
    with without_function_mode(), outside_of_modes():  # a trace gives no address of a tensor
        return span(tensor)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    with without_function_mode(), outside_of_modes():
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _form_of_memory(value: Any) -> Any:
    array = value if isinstance(value, np.ndarray) else np.asarray(memoryview(value))
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


_FORM = Reader(_form_of_memory)
