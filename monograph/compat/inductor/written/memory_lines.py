"""Which memory compiled code takes and gives back, and where: read from the lines that Inductor makes its code of.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import copied_by_gloo, waits
from monograph.compat.patching import replaced

LOGGER = logging.getLogger("monograph")

_NAME: Final = "monograph"
_LAST_STEP: Final = "run_wrapper_ir_passes"
_DECLARED: Final = re.compile(r"\bRAIIAtenTensorHandle (\w+)(?:\(\1_handle\))?;")


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory that compiled code takes: its name, the program's node that it is for, and its bytes.

    `kind` is "temporary", "result" for what is returned, or "inside" for what a kernel takes for itself while it runs.
    """

    name: str
    node: str
    nbytes: int
    kind: str


@dataclass(slots=True)
class Stretch:
    """A piece of compiled code, by a node that it computes: the memory that it takes, and then what it gives back."""

    node: str
    taken: list[Taken] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def as_json(self) -> Any:
        """The same in lists."""
        taken = [[item.name, item.node, item.nbytes, item.kind] for item in self.taken]
        return [self.node, taken, self.left]

    @staticmethod
    def from_json(written: Any) -> Stretch:
        """What was written by `as_json`."""
        node, taken, left = written
        return Stretch(node, [Taken(*item) for item in taken], left)


def notes_of(name: str) -> dict[str, Any]:
    """What is noted of a node, where torch's tracing keeps it for what the node becomes: its name in the program."""
    return {"custom": {_NAME: name}}


@contextmanager
def memory_noted(allocated_by: Callable[..., int]) -> Iterator[list[Stretch]]:
    """While the block runs, the last compilation leaves in the list what its code takes and gives back, in order.

    `allocated_by` says of an op and its arguments, which it may ask for, what its kernel takes.
    What: the method that settles which buffers take over the memory of others, and the lines as they are then.
    Degraded path: without them the list stays empty.
    """
    noted: list[Stretch] = []
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    theirs: Callable[..., Any] | None = getattr(wrapper, _LAST_STEP, None)
    if theirs is None:
        yield noted
        return

    def settled(writer: Any, *args: Any, **options: Any) -> None:
        theirs(writer, *args, **options)
        try:
            noted[:] = _Lines(writer, allocated_by).stretches()
        except Exception as error:  # lines of another torch; the code is made of them all the same
            LOGGER.info("it is not known what memory compiled code takes: %s", error)
            noted.clear()

    with replaced(wrapper, _LAST_STEP, settled):
        yield noted


class _Lines:
    """Reads lines. A name stands for memory, others may stand for the same; it is given back with the last of them."""

    def __init__(self, writer: Any, allocated_by: Callable[..., int]) -> None:
        self._writer = writer
        self._allocated_by = allocated_by
        self._graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
        self._results = set(self._graph.get_output_names())
        self._memory: dict[str, str] = {}  # by the name of a buffer the one that has taken its memory
        self._names: dict[str, set[str]] = {}  # by the latter those that stand for it
        self._sent: dict[
            str, str
        ] = {}  # what collectives take that are on their way, by the names of their results
        self._stretches = [Stretch("")]

    def stretches(self) -> list[Stretch]:
        """What the lines take and give back."""
        for line in self._writer.lines:
            if isinstance(line, str):
                self._declared(line)
            else:
                read = _READ.get(type(line).__name__)
                if read is not None:
                    read(self, line)
        kept = {self._memory[name] for name in self._results & self._memory.keys()}
        self._stretches[-1].left += [name for name, held in self._names.items() if held and name not in kept]
        for stretch in self._stretches:
            stretch.taken = [
                replace(item, kind="result") if item.name in kept else item for item in stretch.taken
            ]
        return [item for item in self._stretches if item.node or item.taken or item.left]

    def begin(self, line: Any) -> None:
        """A kernel, or a part of one: it has a node of the graph as its context."""
        name = _named([line.context])
        last = self._stretches[-1]
        if name and name != last.node:
            if not (last.node or last.taken or last.left):
                self._stretches.pop()
            self._stretches.append(Stretch(name))

    def allocate(self, line: Any) -> None:
        """A buffer with memory of its own, unless that is on the stack."""
        on_stack = getattr(self._writer, "can_stack_allocate_buffer", None)
        if on_stack is None or not on_stack(line.node):
            self._take(line.node)

    def reuse(self, line: Any) -> None:
        """A buffer in the memory of another one, which may be gone then."""
        old, new = line.node.get_name(), line.reused_as.get_name()
        self._share(old, new)
        if line.delete_old and old not in self._results:
            self._drop(old)

    def reinterpret(self, line: Any) -> None:
        """A buffer that is a view of another one."""
        self._share(line.node.get_name(), line.reused_as.get_name())

    def free(self, line: Any) -> None:
        """The end of a buffer, if its memory does not go to another one."""
        if not line.is_reused:
            self._drop(line.node.get_name())

    def call(self, line: Any) -> None:
        """A kernel of torch's that makes its results, or views of what it is given."""
        shown = list(line.node.get_inputs_that_alias_output())
        for made in _flat(getattr(line.node, "outputs", None) or [line.node]):
            if shown:
                self._share(shown[0], made.get_name())
            elif made.has_tensor_output():
                self._take(made)
        if waits(line.node.op_overload):
            self._done(line.node.inputs[0].get_name())
        self._work(line.node)

    def _declared(self, line: str) -> None:
        """A result of an op that has no interface in C."""
        for name in _DECLARED.findall(line):
            made = self._graph.try_get_buffer(name)
            if made is None or not made.has_tensor_output():
                continue
            if shown := list(made.get_inputs_that_alias_output()):
                self._share(shown[0], name)
            else:
                self._take(made)
                self._begin_collective(made)

    def _take(self, buffer: Any) -> None:
        name = buffer.get_name()
        node = _named(_in_order(buffer)) or self._stretches[-1].node
        self._memory[name] = name
        self._names[name] = {name}
        self._add(Taken(name, node, self._nbytes(buffer.get_layout()), "temporary"))

    def _begin_collective(self, call: Any) -> None:
        """What a collective takes besides its result, until it is waited for."""
        given = sum(self._nbytes(item.get_layout()) for item in getattr(call, "inputs", ()))
        copied = copied_by_gloo(getattr(call, "op_overload", None), given, self._nbytes(call.get_layout()))
        if copied:
            self._sent[call.get_name()] = self._inside(call, copied)

    def _done(self, name: str) -> None:
        """The end of a collective."""
        if name in self._sent:
            self._stretches[-1].left.append(self._sent.pop(name))

    def _work(self, call: Any) -> None:
        """What a kernel of torch's takes besides its results."""
        most = self._allocated_by(call.op_overload, lambda: self._arguments(call))
        made = _flat(getattr(call, "outputs", None) or [call])
        inside = most - sum(self._nbytes(item.get_layout()) for item in made if item.has_tensor_output())
        if inside > 0:
            self._stretches[-1].left.append(self._inside(call, inside))

    def _inside(self, call: Any, nbytes: int) -> str:
        """Memory that a call takes for itself."""
        name = f"{call.get_name()} inside"
        node = _named(_in_order(call)) or self._stretches[-1].node
        self._add(Taken(name, node, nbytes, "inside"))
        return name

    def _arguments(self, call: Any) -> Any:
        """What a kernel is given, by place and by name, its tensors on the device `meta`."""
        tensors = [self._like(item.get_layout()) for item in call.inputs]
        ordered = getattr(call, "unflatten_args", None)
        args, kwargs = (
            ordered(tensors, call.constant_args) if ordered else ((*tensors, *call.constant_args), {})
        )
        return fx.node.map_aggregate((tuple(args), {**call.kwargs, **kwargs}), self._number)

    def _like(self, layout: Any) -> torch.Tensor:
        shape, stride = ([*map(self._size, sizes)] for sizes in (layout.size, layout.stride))
        return torch.empty_strided(shape, stride, dtype=layout.dtype, device="meta")

    def _number(self, item: Any) -> Any:
        """A number that was an expression of sizes."""
        return self._size(item) if type(item).__module__.startswith("sympy") else item

    def _add(self, taken: Taken) -> None:
        if self._stretches[-1].left:  # the next call, after what the one before has given back
            self._stretches.append(Stretch(self._stretches[-1].node))
        self._stretches[-1].taken.append(taken)

    def _nbytes(self, layout: Any) -> int:
        return self._size(layout.storage_size()) * int(layout.dtype.itemsize)

    def _size(self, expression: Any) -> int:
        """A size as it is in this compilation."""
        sizes = self._graph.sizevars
        hint = sizes.optimization_hint if hasattr(sizes, "optimization_hint") else sizes.size_hint
        return int(hint(expression, fallback=0))

    def _share(self, old: str, new: str) -> None:
        if (owner := self._memory.get(old)) is not None:
            self._memory[new] = owner
            self._names[owner].add(new)

    def _drop(self, name: str) -> None:
        owner = self._memory.get(name)
        if owner is None or name not in self._names[owner]:
            return
        self._names[owner].discard(name)
        if not self._names[owner]:
            self._stretches[-1].left.append(owner)


_READ: Final[dict[str, Callable[[_Lines, Any], None]]] = {
    "LineContext": _Lines.begin,
    "AllocateLine": _Lines.allocate,
    "ReuseLine": _Lines.reuse,
    "ReinterpretLine": _Lines.reinterpret,
    "FreeIfNotReusedLine": _Lines.free,
    "ExternKernelAllocLine": _Lines.call,
}


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        elif item is not None:
            yield item


def _in_order(buffer: Any) -> Sequence[fx.Node]:
    """The nodes that a buffer is made of, as they stand in the graph."""
    return sorted(getattr(buffer, "origins", None) or buffer.get_origins())


def _named(nodes: Iterable[Any]) -> str:
    """The name in the program of the last of these nodes that has one."""
    named = [
        node.meta.get("custom", {}).get(_NAME)
        for node in nodes
        if isinstance(node, fx.Node) and isinstance(node.meta.get("custom"), dict)
    ]
    return next((name for name in reversed(named) if name), "")
