"""What a rank does in a step, as far as other ranks notice: it computes, begins collectives, waits for them, sends and receives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, waits
from monograph.compat.ops import named_arguments, packet_name
from monograph.distributed.agreement.signature import signature_of
from monograph.distributed.programs.begun import VIEWS
from monograph.distributed.programs.collectives import awaited_by
from monograph.distributed.programs.transfers import Transfer, transfer_of
from monograph.ir.memory import is_view
from monograph.ir.meta import computes, form, metas, output_nodes, value
from monograph.ir.port import Role
from monograph.ir.printer import short_target
from monograph.ir.program import Program
from monograph.recompute.arithmetic import flops

_aten = torch.ops.aten
# what only some ranks do to what they send: parts of other sizes are padded, or copied
_SMALL_MATTERS: Final = VIEWS | {_aten.constant_pad_nd.default, _aten.clone.default}
_SEND: Final = "isend"
_ONE_BY_ONE: Final = (_SEND, "irecv")


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


def steps_of(program: Program, size_of: Callable[[str], int]) -> Steps:
    """What a rank does in a step. `size_of` has the number of processes of a group by its name."""
    reader = _Reader(size_of)
    events = tuple(_together(reader.read(program, [port.path for port in program.inputs], "")))
    renewed = {
        port.path: reader.contents[node]
        for port, node in zip(program.outputs, output_nodes(program.graph), strict=True)
        if port.role is Role.STATE and isinstance(node, fx.Node)
    }
    return Steps(events, renewed)


def _together(events: Iterator[Event]) -> Iterator[Event]:
    """Work that is not interrupted, as one."""
    ops: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, Work):
            ops += event.ops
            continue
        if ops:
            yield Work(tuple(ops))
            ops = []
        yield event
    if ops:
        yield Work(tuple(ops))


class _Reader:
    def __init__(self, size_of: Callable[[str], int]) -> None:
        self._size_of = size_of
        self._work: dict[fx.Node, Work] = {}
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
            if node.op == "call_module" and node.target in parts:
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

    def _done(self, node: fx.Node) -> Work:
        if node not in self._work:
            tensors = [meta for item in (*node.all_input_nodes, node) for meta in metas(value(item))]
            moved = 0 if is_view(node) else sum(meta.nbytes for meta in tensors)
            self._work[node] = Work(((flops(node), moved),) if moved else ())
        return self._work[node]

    def _begun(self, node: fx.Node, key: str, contents: Mapping[fx.Node, str]) -> Event:
        name = packet_name(node.target).partition("::")[2]
        arguments = named_arguments(node.target, node.args, node.kwargs)
        if name in _ONE_BY_ONE:
            peer = arguments["dst" if name == _SEND else "src"]
            lists: Any = [name], [peer], [arguments["tag"]], [arguments["tensor"]]
        elif "op_list" in arguments:
            lists = [arguments[item] for item in ("op_list", "peer_list", "tag_list", "tensors")]
        else:
            (what,) = signature_of([node], tensor_of=form).collectives
            sent = _digest(name, *(contents[item] for item in node.all_input_nodes))
            return Begin(key, str(what), sent, transfer_of(node, self._size_of))
        messages = [
            (kind, Message(int(peer), int(tag), str(form(tensor)), _nbytes(tensor)))
            for kind, peer, tag, tensor in zip(*lists, strict=True)
        ]
        return Post(
            key,
            str(arguments["group_name"]),
            tuple(message for kind, message in messages if kind == _SEND),
            tuple(message for kind, message in messages if kind != _SEND),
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
