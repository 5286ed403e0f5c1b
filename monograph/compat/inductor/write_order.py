"""The order of a compiled step: what can fail when it runs comes before the first write into the caller's tensors.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, waits
from monograph.compat.inductor.checks.indices import Check, checks_in, divides, fails_on_values
from monograph.compat.inductor.less_work import are_apart

_COPY = torch.ops.aten.copy_.default
_IN_PLACE = "reinplace_inplaceable_ops_core"
_HOOKS = ("fuse_nodes", "can_fuse", "fuse_two_nodes", "compute_last_usage")
_CPP_HOOKS = ("codegen_node", "flush")
_MANY = 2**14  # elements


# Collectives begin where the program says; torch's passes for overlap would begin all gathers of ZeRO 3 before the first wait.
OF_COLLECTIVES: Mapping[str, Any] = {"reorder_for_peak_memory": False}


def order_of(graph: fx.Graph) -> Mapping[str, Any]:
    """The options by which Inductor orders a graph."""
    return OF_COLLECTIVES if any(communicates(node.target) for node in graph.nodes) else {}


class UnorderedError(Exception):
    """A kernel both writes into the caller's tensors and can fail, or must come before one that can."""


def can_order() -> bool:
    """True if Inductor's scheduler has what is replaced here."""
    in_cpp = all(hasattr(_cpp(), name) for name in _CPP_HOOKS)
    return in_cpp and all(hasattr(_scheduler(), name) for name in _HOOKS)


@contextmanager
def writes_last(*, flagged: bool, copied: bool) -> Iterator[None]:
    """Compile kernels that can fail, and what they need, before kernels that write into the caller's tensors.

    With `flagged`, a write into the last input comes before all others: it says that they have begun. Raises
    UnorderedError, wrapped by Inductor, if a graph cannot be ordered; with `copied`, nothing but copies writes.
    What: methods of Inductor's scheduler, and one of its writer of C++, are wrapped. Fusions that would make a kernel which does both, or a circle, are
    refused; before the memory of buffers is planned, writes move after the last kernel that can fail. And the function
    that lets ops write into inputs does not see the copies into them, if it is asked not to. Degraded path: if one of
    the methods is missing, nothing is wrapped, and `can_order` says so; without the function, UnorderedError stands.
    """
    with ExitStack() as stack:
        if can_order():
            for owner, name in (*((_scheduler(), name) for name in _HOOKS), (_cpp(), _CPP_HOOKS[0])):
                theirs = inspect.getattr_static(owner, name)
                stack.callback(setattr, owner, name, theirs)
                setattr(owner, name, _WRAPPERS[name](flagged, theirs))
        passes: Any = importlib.import_module("torch._inductor.fx_passes.reinplace")
        if copied and hasattr(passes, _IN_PLACE):
            theirs = getattr(passes, _IN_PLACE)
            stack.callback(setattr, passes, _IN_PLACE, theirs)
            setattr(passes, _IN_PLACE, partial(_without_copies, theirs))
        yield


def _without_copies(theirs: Callable[[fx.Graph], None], graph: fx.Graph) -> None:
    copies = graph.find_nodes(op="call_function", target=_COPY)
    for node in copies:
        node.target = _hidden
    theirs(graph)
    for node in copies:
        node.target = _COPY


def _hidden(into: Any, value: Any) -> None:
    """Stands for a copy."""


def _scheduler() -> Any:
    return importlib.import_module("torch._inductor.scheduler").Scheduler


def _cpp() -> Any:
    return importlib.import_module("torch._inductor.codegen.cpp").CppScheduling


def _fuse_nodes(flagged: bool, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def fuse_nodes(scheduler: Any, nodes: list[Any]) -> Any:
        scheduler.monograph_phases = _Phases(scheduler, nodes, flagged)
        return theirs(scheduler, nodes)

    return fuse_nodes


def _can_fuse(_flagged: bool, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def can_fuse(scheduler: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        if are_apart(node1, node2) or not scheduler.monograph_phases.may_join(node1, node2):
            return False
        return bool(theirs(scheduler, node1, node2, *args, **kwargs))

    return can_fuse


def _fuse_two_nodes(_flagged: bool, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def fuse_two_nodes(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        made = theirs(scheduler, *args, **kwargs)
        scheduler.monograph_phases.joined(made)
        return made

    return fuse_two_nodes


def _compute_last_usage(_flagged: bool, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def compute_last_usage(scheduler: Any) -> Any:
        scheduler.nodes = scheduler.monograph_phases.ordered(scheduler.nodes)
        return theirs(scheduler)

    return compute_last_usage


def _codegen_node(_flagged: bool, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A division by zero is reported when the C++ function that it is in ends: that is before the first write."""

    def codegen_node(writer: Any, node: Any) -> Any:
        if node is writer.scheduler.monograph_phases.first_behind_division:
            writer.flush()
        return theirs(writer, node)

    return codegen_node


_WRAPPERS: Mapping[str, Callable[..., Any]] = {
    "fuse_nodes": _fuse_nodes,
    "can_fuse": _can_fuse,
    "fuse_two_nodes": _fuse_two_nodes,
    "compute_last_usage": _compute_last_usage,
    "codegen_node": _codegen_node,
}


class _Phases:
    """What must come early: all that can fail, and what it needs. What must come late: writes, and what needs them.

    Ops are Inductor's, before fusion; the ops of one kernel come together.
    """

    def __init__(self, scheduler: Any, nodes: Sequence[Any], flagged: bool) -> None:
        ops = [op for node in nodes for op in node.get_nodes()]
        self._scheduler = scheduler
        self._together: dict[str, list[str]] = {}  # the ops of each op's kernel
        self._before = {op.get_name(): _needed_by(scheduler, op) for op in ops}
        self._behind: dict[str, list[str]] = {op.get_name(): [] for op in ops}
        for name, needed in self._before.items():
            for other in needed:
                self._behind[other].append(name)
        for node in nodes:
            self._note(node)
        written = {op.get_name(): _written_outside(scheduler, op) for op in ops}
        self._flag = _flag_among(written) if flagged else None
        self._writing = {name for name, into in written.items() if into}
        self._failing = _failing(ops, self._before)
        bodies = (getattr(op, "_body", None) for op in ops)
        self._divides = any(body is not None and divides(body) for body in bodies)
        self.first_behind_division: Any = None  # the kernel with the first write, if a kernel divides
        self._early: set[str] = set()
        self._late: set[str] = set()
        _spread(self._failing, self._before, self._together, self._early)
        _spread(self._writing, self._behind, self._together, self._late)

    def may_join(self, node1: Any, node2: Any) -> bool:
        """True if two kernels may become one."""
        names = [op.get_name() for node in (node1, node2) for op in node.get_nodes()]
        if self._flag in names:
            return False
        return self._early.isdisjoint(names) or self._late.isdisjoint(names)

    def joined(self, node: Any) -> None:
        """Two kernels have become this one."""
        names = self._note(node)
        if not self._early.isdisjoint(names):
            _spread(set(names) - self._early, self._before, self._together, self._early)
        if not self._late.isdisjoint(names):
            _spread(set(names) - self._late, self._behind, self._together, self._late)

    def ordered(self, nodes: Sequence[Any]) -> list[Any]:
        """The kernels with writes, and what needs them, after the last that can fail; else in their order."""
        names = [[op.get_name() for op in node.get_nodes()] for node in nodes]
        together = {name: group for group in names for name in group}
        late: set[str] = set()
        _spread(self._writing, self._behind, together, late)
        failing = [index for index, group in enumerate(names) if not self._failing.isdisjoint(group)]
        if any(not late.isdisjoint(names[index]) for index in failing):
            raise UnorderedError("writes cannot come after all that can fail")
        cut = failing[-1] + 1 if failing else 0
        early = [node for node, group in zip(nodes[:cut], names, strict=False) if late.isdisjoint(group)]
        rest = [node for node, group in zip(nodes[:cut], names, strict=False) if not late.isdisjoint(group)]
        rest += nodes[cut:]
        flag = [node for node in rest if self._flag in [op.get_name() for op in node.get_nodes()]]
        rest = [*flag, *(node for node in rest if node not in flag)]
        writing = (node for node in rest if not late.isdisjoint([op.get_name() for op in node.get_nodes()]))
        self.first_behind_division = next(writing, None) if self._divides else None
        return _when_needed([*early, *rest])

    def _note(self, node: Any) -> list[str]:
        names = [op.get_name() for op in node.get_nodes()]
        self._together |= dict.fromkeys(names, names)
        return names


def _when_needed(nodes: Sequence[Any]) -> list[Any]:
    """Kernels in their order, but those that fill a large buffer from nothing, or wait, come when it is needed first.

    The gradient of an embedding is added up in such a buffer, at the end of the backward pass.
    """
    moved: dict[int, list[Any]] = {}  # by the place of the kernel that they come before
    for index, node in enumerate(nodes):
        if _fills(node) or waits(getattr(getattr(node, "node", None), "op_overload", None)):
            made = set(node.get_buffer_names())
            rest = range(index + 1, len(nodes))
            readers = (
                place for place in rest if any(item.name in made for item in nodes[place].unmet_dependencies)
            )
            moved.setdefault(next(readers, index), []).append(node)
    late = {node.get_name() for those in moved.values() for node in those}
    order: list[Any] = []
    for index, node in enumerate(nodes):
        order += moved.get(index, [])
        if node.get_name() not in late:
            order.append(node)
    return order


def _fills(node: Any) -> bool:
    """True for a loop that reads nothing and makes many elements."""
    is_loop = type(node).__name__ in ("SchedulerNode", "FusedSchedulerNode")
    if not is_loop or node.read_writes.reads or node.unmet_dependencies:
        return False
    buffers = [made for made in node.get_outputs() if not made.get_mutations()]
    sizes = [size for made in buffers for size in made.node.get_size()]
    alone = len(buffers) == len(node.get_outputs()) and all(
        getattr(size, "is_number", True) for size in sizes
    )
    counts = (math.prod(map(int, made.node.get_size())) for made in buffers)
    return alone and max(counts, default=0) >= _MANY


def _spread(
    begin: Iterable[str],
    along: Mapping[str, Iterable[str]],
    together: Mapping[str, Sequence[str]],
    found: set[str],
) -> None:
    """Add to `found` what is reached from `begin`, with all ops of a kernel at once."""
    open_names = list(begin)
    while open_names:
        for name in together.get(open_names.pop(), ()):
            if name not in found:
                found.add(name)
                open_names += along[name]


def _needed_by(scheduler: Any, op: Any) -> list[str]:
    names = (
        scheduler.name_to_buf[dependency.name].defining_op_name() for dependency in op.unmet_dependencies
    )
    return sorted(set(names))


def _written_outside(scheduler: Any, op: Any) -> set[str]:
    """The buffers that an op writes into and that are not of this graph: inputs and constants."""
    found: set[str] = set()
    seen: set[str] = set()
    open_names = [name for made in op.get_outputs() for name in made.get_mutations()]
    while open_names:
        name = open_names.pop()
        if name in seen:
            continue
        seen.add(name)
        made = scheduler.name_to_buf.get(name)
        if made is None:
            found.add(name)
        else:
            open_names += [*made.get_mutations(), *made.get_aliases()]
    return found


def _flag_among(written: Mapping[str, Set[str]]) -> str | None:
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    last = graph.graph_input_names[-1:]
    return next((name for name, into in written.items() if into and into == set(last)), None)


def _failing(ops: Sequence[Any], before: Mapping[str, Iterable[str]]) -> set[str]:
    """The ops that can fail, but for those whose very checks were made by an op that they need.

    The backward of an embedding checks again what the forward has checked; updates need not wait for it.
    """
    changed = {name for op in ops for made in op.get_outputs() for name in made.get_mutations()}
    checks = {op.get_name(): _checks(op, changed) for op in ops}
    alone = {name: [name] for name in before}

    def is_new(name: str) -> bool:
        found = checks[name]
        if not found:
            return found is None
        needed: set[str] = set()
        _spread(before[name], before, alone, needed)
        made = [check for other in needed for check in checks[other] or ()]
        return not all(any(earlier.covers(check) for earlier in made) for check in found)

    return {name for name in checks if is_new(name)}


def _checks(op: Any, changed: Set[str]) -> Sequence[Check] | None:
    """The checks of indices that an op makes; None if it can fail in other ways."""
    scheduler: Any = importlib.import_module("torch._inductor.scheduler")
    if isinstance(op, scheduler.NopKernelSchedulerNode):
        return ()
    if isinstance(op, scheduler.ExternKernelSchedulerNode):
        return None if fails_on_values(op.node) else ()
    body = getattr(op, "_body", None)
    return None if body is None else checks_in(body, changed)
