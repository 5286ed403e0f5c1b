"""How many bytes a program holds at each of its ops, and who holds them where they are most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import fx

from monograph.distributed.programs.collectives import awaited_by
from monograph.ir.meta import computes, origin
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.text import Displayed, bytes_text
from monograph.plan.alias import Aliases, Shown, Storage
from monograph.plan.workspace import sent_copy_bytes
from monograph.user_code.lines import Origin


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are held while `node` runs, and those that are left when its dead values are freed."""

    node: str
    running_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds memory at the peak: the op that made it. `kind` is "result", "state", "temporary" or "inside".

    "state" is new state that waits for the end of the step; "inside" is what a part holds while it runs, or a collective until
    it is done.
    """

    node: str
    kind: str
    nbytes: int
    origin: Origin


@dataclass(frozen=True, repr=False)
class MemoryPlan(Displayed):
    """The memory of a run that replays op by op, and writes new state back after the last of them.

    What the caller holds all the time is counted apart: `state_bytes` and `argument_bytes`. `peak_bytes` is what the
    program itself holds besides when it holds most, without the workspaces that kernels allocate inside.
    """

    state_bytes: int
    argument_bytes: int
    peak_bytes: int
    peak_node: str
    holders: tuple[Holder, ...]  # at the peak, the largest first
    timeline: tuple[Moment, ...]

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.peak_bytes)} at most, at {self.peak_node or 'no op'}, besides {bytes_text(self.state_bytes)} of state "
            f"and {bytes_text(self.argument_bytes)} of arguments"
        )


def plan_memory(
    program: Program,
    frees: Mapping[str, tuple[str, ...]],
    memory: Aliases,
    parts: Mapping[str, MemoryPlan],
) -> MemoryPlan:
    """Follow the values through their lives; `parts` has the memory of the subgraphs by their names."""
    timeline = timeline_of(program, frees, memory, parts)
    peak = peak_of(timeline)
    return MemoryPlan(
        state_bytes=_input_bytes(program, memory, of_calls=False),
        argument_bytes=_input_bytes(program, memory, of_calls=True),
        peak_bytes=peak.running_bytes,
        peak_node=peak.node,
        holders=_holders(program, frees, memory, parts, peak),
        timeline=tuple(timeline),
    )


def timeline_of(
    program: Program,
    frees: Mapping[str, tuple[str, ...]],
    memory: Aliases,
    parts: Mapping[str, MemoryPlan],
) -> list[Moment]:
    """The bytes that a program itself holds at each of its ops."""
    held, timeline = _Held(program, memory, parts), []
    for node in filter(computes, program.graph.nodes):
        running_bytes = held.run(node)
        held.free(frees.get(node.name, ()))
        timeline.append(Moment(node.name, running_bytes, held.nbytes))
    return timeline


def peak_of(timeline: Iterable[Moment]) -> Moment:
    """The moment at which most is held."""
    return max(timeline, key=lambda moment: moment.running_bytes, default=Moment("", 0, 0))


def _input_bytes(program: Program, memory: Aliases, *, of_calls: bool) -> int:
    nodes = program.graph.find_nodes(op="placeholder")
    wanted = [
        node for port, node in zip(program.inputs, nodes, strict=True) if (port.role is Role.USER) is of_calls
    ]
    return sum(storage.nbytes for node in wanted for storage in memory.certain[node.name])


class _Held:
    """Counts for each storage the values that hold it. One that no value holds any more is gone."""

    def __init__(self, program: Program, memory: Aliases, parts: Mapping[str, MemoryPlan]) -> None:
        outside = [node for node in program.graph.nodes if node.op in ("placeholder", "get_attr")]
        self._outside = frozenset(chain.from_iterable(memory.certain[node.name] for node in outside))
        self._memory, self._parts = memory, parts
        self._own: dict[
            str, frozenset[Storage]
        ] = {}  # by value, since each is asked for when it is made and when it is freed
        self.values: dict[Storage, int] = {}
        self.sent: dict[fx.Node, int] = {}  # the bytes of copies that collectives hold
        self.nbytes = 0

    def run(self, node: fx.Node) -> int:
        """Take what `node` makes; gives the bytes that are held while it runs."""
        before = self.nbytes
        for storage in self._of(node.name):
            if storage not in self.values:
                self.nbytes += storage.nbytes
            self.values[storage] = self.values.get(storage, 0) + 1
        if copied := sent_copy_bytes(node):
            self.sent[node] = copied
            self.nbytes += copied
        elif (awaited := awaited_by(node)) is not None:
            self.nbytes -= self.sent.pop(awaited, 0)
        return max(self.nbytes, before + self._inside(node))

    def free(self, names: Iterable[str]) -> None:
        """Let go of values."""
        for storage in chain.from_iterable(map(self._of, names)):
            self.values[storage] -= 1
            if not self.values[storage]:
                del self.values[storage]
                self.nbytes -= storage.nbytes

    def _of(self, name: str) -> frozenset[Storage]:
        own = self._own.get(name)
        if own is None:
            own = self._own[name] = self._memory.certain[name] - self._outside
        return own

    def _inside(self, node: fx.Node) -> int:
        part = self._parts.get(str(node.target)) if node.op == "call_module" else None
        return part.peak_bytes if part is not None else 0


def _holders(
    program: Program,
    frees: Mapping[str, tuple[str, ...]],
    memory: Aliases,
    parts: Mapping[str, MemoryPlan],
    peak: Moment,
) -> tuple[Holder, ...]:
    """What is held while the node of the peak runs."""
    held = _Held(program, memory, parts)
    for node in filter(computes, program.graph.nodes):
        held.run(node)
        if node.name == peak.node:
            break
        held.free(frees.get(node.name, ()))
    kinds: dict[Storage, str] = {}
    for port, form in zip(program.outputs, memory.outputs, strict=True):
        if isinstance(form, Shown):
            kinds |= dict.fromkeys(form.certain, "state" if port.role is Role.STATE else "result")
    makers = {node.name: node for node in program.graph.nodes}
    found = [
        Holder(item.maker, kinds.get(item, "temporary"), item.nbytes, origin(makers[item.maker]))
        for item in held.values
    ]
    found += [Holder(node.name, "inside", copied, origin(node)) for node, copied in held.sent.items()]
    if peak.running_bytes > held.nbytes:
        inside = peak.running_bytes - held.nbytes
        found.append(Holder(peak.node, "inside", inside, origin(makers[peak.node])))
    return tuple(sorted(found, key=lambda item: (-item.nbytes, item.node)))
