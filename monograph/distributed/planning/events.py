"""What a rank does in a step, as far as other ranks notice: it computes, begins collectives, waits for them, sends and receives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, transfers, waits
from monograph.compat.ops import named_arguments, packet_name
from monograph.distributed.agreement.signature import signature_of
from monograph.distributed.programs.begun import VIEWS
from monograph.distributed.programs.collectives import awaited_by
from monograph.distributed.programs.transfers import SENDS, Transfer, transfer_of
from monograph.ir.memory import is_view
from monograph.ir.meta import computes, form, labels, metas, output_nodes, value
from monograph.ir.ops.arithmetic import flops
from monograph.ir.port import Role
from monograph.ir.printer import short_target
from monograph.ir.program import Program

_aten = torch.ops.aten
# what only some ranks do to what they send: parts of other sizes are padded, or copied
_SMALL_MATTERS: Final = VIEWS | {_aten.constant_pad_nd.default, _aten.clone.default}
_OF_ONE: Final = "broadcast"  # what the others give is not sent
_PEERS: Final = ("to", "dst", "source", "src")  # what ops call the other rank


@dataclass(frozen=True)
class Work:
    """Ops that run one after the other: the arithmetic of each, and the bytes that it reads and writes."""

    ops: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Begin:
    """A collective begins. `what` is all that ranks must agree on, `content` tells what is sent from what else could be."""

    key: str
    what: str
    content: str
    transfer: Transfer


@dataclass(frozen=True)
class Message:
    """What is sent to, or received from, the rank with this number in a group."""

    peer: int
    tag: int
    form: str
    nbytes: int


@dataclass(frozen=True)
class Post:
    """Messages are on their way from now on."""

    key: str
    group: str
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The rank goes on when what it has begun under this key is done."""

    key: str


Event: TypeAlias = Work | Begin | Post | Wait


@dataclass(frozen=True)
class Steps:
    """The events of a rank in order, and by path what new state is made of."""

    events: tuple[Event, ...]
    renewed: Mapping[str, str]


def steps_of(program: Program, size_of: Callable[[str], int], between: Collection[str] = ()) -> Steps:
    """What a rank does in a step. `size_of` has the number of processes of a group by its name.

    `between` names the groups of ranks that have programs of their own, as the stages of a pipeline do: each gives values of
    its own to a collective of these, which all know by the same label.
    """
    reader = _Reader(size_of, between)
    events = tuple(_together(reader.read(program, [port.path for port in program.inputs], "")))
    renewed = {
        port.path: reader.contents[node]
        for port, node in zip(program.outputs, output_nodes(program.graph), strict=True)
        if port.role is Role.STATE and isinstance(node, fx.Node)
    }
    return Steps(events, renewed)


def _together(events: Iterator[Event]) -> Iterator[Event]:
    """Ops that run one after the other, as one; those of a part are so already."""
    ops: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, Work) and len(event.ops) < 2:
            ops += event.ops
            continue
        if ops:
            yield Work(tuple(ops))
            ops = []
        yield event
    if ops:
        yield Work(tuple(ops))


class _Reader:
    def __init__(self, size_of: Callable[[str], int], between: Collection[str]) -> None:
        self._size_of, self._between = size_of, between
        self._work: dict[fx.Node, Work] = {}
        self._parts: dict[str, Work | None] = {}
        self.contents: dict[fx.Node, str] = {}  # of the program that was read last

    def read(self, program: Program, given: Sequence[str], prefix: str) -> Iterator[Event]:
        parts = {part.name: part for part in program.parts}
        inputs = iter(given)
        contents: dict[fx.Node, str] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                contents[node] = next(inputs)
                continue
            if not computes(node):
                continue
            contents[node] = _content(node, contents)
            key = f"{prefix}{node.name}"
            if (
                node.op == "call_module"
                and node.target in parts
                and (work := self._quiet(parts[str(node.target)]))
            ):
                yield work
            elif node.op == "call_module" and node.target in parts:
                arguments = [_of_argument(item, contents) for item in node.args]
                yield from self.read(parts[str(node.target)], arguments, f"{key}/")
            elif waits(node.target):
                if (begun := awaited_by(node)) is not None:
                    yield Wait(f"{prefix}{begun.name}")
            elif communicates(node.target):
                yield self._begun(node, key, contents)
            else:
                yield self._done(node)
        self.contents = contents

    def _quiet(self, part: Program) -> Work | None:
        """What a part does that does not communicate; None if it does."""
        if part.name not in self._parts:
            nodes = [*part.ops()]
            talks = any(communicates(node.target) for node in nodes)
            ops = (op for node in nodes for op in self._done(node).ops)
            self._parts[part.name] = None if talks else Work(tuple(ops))
        return self._parts[part.name]

    def _done(self, node: fx.Node) -> Work:
        if node not in self._work:
            tensors = [meta for item in (*node.all_input_nodes, node) for meta in metas(value(item))]
            moved = 0 if node.target is getitem or is_view(node) else sum(meta.nbytes for meta in tensors)
            self._work[node] = Work(((flops(node), moved),) if moved else ())
        return self._work[node]

    def _begun(self, node: fx.Node, key: str, contents: Mapping[fx.Node, str]) -> Event:
        name = packet_name(node.target).partition("::")[2]
        arguments = named_arguments(node.target, node.args, node.kwargs)
        if not transfers(node.target):
            (what,) = signature_of([node], tensor_of=form).collectives
            transfer = transfer_of(node, self._size_of)
            if transfer.group in self._between:
                given = labels(node)
            else:
                given = () if name == _OF_ONE else tuple(contents[item] for item in node.all_input_nodes)
            return Begin(key, str(what), _digest(name, *given), transfer)
        if "op_list" in arguments:
            lists: Any = [arguments[item] for item in ("op_list", "peer_list", "tag_list", "tensors")]
        else:
            peers = [arguments[item] for item in _PEERS if item in arguments]
            lists = [name], peers, [arguments["tag"]], [arguments.get("tensor", node)]
        messages = [
            (kind, Message(int(peer), int(tag), str(form(tensor)), _nbytes(tensor)))
            for kind, peer, tag, tensor in zip(*lists, strict=True)
        ]
        return Post(
            key,
            str(arguments["group_name"]),
            tuple(message for kind, message in messages if kind in SENDS),
            tuple(message for kind, message in messages if kind not in SENDS),
        )


def _content(node: fx.Node, contents: Mapping[fx.Node, str]) -> str:
    """What a value is made of: ops and inputs, without numbers, and without what only some ranks do."""
    inputs = [contents[item] for item in node.all_input_nodes if item in contents]
    if (node.target in _SMALL_MATTERS or waits(node.target)) and inputs:
        return inputs[0]
    number = str(node.args[1]) if node.target is getitem else ""
    target = str(node.target) if node.op == "call_module" else short_target(node.target)
    return _digest(target, number, *inputs)


def _of_argument(item: Any, contents: Mapping[fx.Node, str]) -> str:
    return contents.get(item, "") if isinstance(item, fx.Node) else ""


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _nbytes(node: fx.Node) -> int:
    described = form(node)
    return 0 if described is None else described.nbytes
