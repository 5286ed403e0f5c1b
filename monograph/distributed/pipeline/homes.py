"""An update over ranks: each op runs where its parameter is, and what all need is sent to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from monograph.ir.meta import TensorMeta, come_from, metas, set_value, value
from monograph.ir.ops.fused import IN_PLACE as FUSED
from monograph.ir.port import Port
from monograph.ir.program import Program

_aten = torch.ops.aten
_CHECK: Final = _aten._amp_foreach_non_finite_check_and_unscale.default


@dataclass
class Homes:
    """The ops of an update, those on lists in one for each rank, with the rank of each; None for what all ranks compute.

    An op that reads values of several ranks runs on all of them, in a later round: these values are sent to all first.
    """

    program: Program
    rank_of: Callable[[Port], int | None]  # where state or a gradient is
    graph: fx.Graph = field(default_factory=fx.Graph)
    home: dict[fx.Node, int | None] = field(default_factory=dict)
    round: dict[fx.Node, int] = field(default_factory=dict)
    sent: dict[fx.Node, None] = field(default_factory=dict)  # to all ranks, after its round
    ports: dict[fx.Node, Port] = field(default_factory=dict)
    outputs: list[tuple[Any, Port]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._new: dict[fx.Node, fx.Node] = {}
        self._pieces: dict[fx.Node, _Pieces] = {}
        ports = iter(self.program.inputs)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                port = next(ports)
                made = self._copied(node)
                self.ports[made] = port
                self.home[made], self.round[made] = self.rank_of(port), 0
            elif node.op == "output":
                items = fx.map_arg(node.args[0], self._new.__getitem__)
                self.outputs = list(zip(items, self.program.outputs, strict=True))
                self.graph.output(items)
            elif not (self._item_of_pieces(node) or self._in_pieces(node)):
                self._settle(self._copied(node))
        self.split = Program(
            self.program.name,
            fx.GraphModule(self.program.module, self.graph),
            self.program.inputs,
            self.program.outputs,
        )

    @property
    def rounds(self) -> int:
        """How many there are."""
        return max(self.round.values(), default=0) + 1

    def send(self, node: fx.Node) -> None:
        """Let all ranks have a value."""
        if self.home[node] is not None:
            self.sent[node] = None

    def _copied(self, node: fx.Node) -> fx.Node:
        self._new[node] = self.graph.node_copy(node, self._new.__getitem__)
        return self._new[node]

    def _settle(self, node: fx.Node) -> None:
        """Find the rank and the round of an op."""
        read = node.all_input_nodes
        if node.target is getitem:
            self.home[node], self.round[node] = self.home[read[0]], self.round[read[0]]
            return
        ranks = {self.home[item] for item in read} - {None}
        own = next(iter(ranks)) if len(ranks) == 1 else None
        self.home[node] = own
        foreign = [item for item in read if self.home[item] is not None and self.home[item] != own]
        for item in foreign:
            self.sent[item] = None
        after = [self.round[item] + (item in self.sent and self.home[item] != own) for item in read]
        self.round[node] = max(after, default=0)

    # --- ops on lists --------------------------------------------------------------------------------------------

    def _in_pieces(self, node: fx.Node) -> bool:
        """Write an op on lists as several, if its elements are of several ranks."""
        if not _works_by_element(node) or not all(_is_item(user) for user in node.users):
            return False
        lists = [item for item in node.args if isinstance(item, (list, tuple)) and item]
        nodes = [items for items in lists if any(isinstance(item, fx.Node) for item in items)]
        count = max(map(len, nodes), default=0)
        if any(len(items) != count for items in lists):
            return False
        ranks = [self._rank_of_element([items[index] for items in nodes]) for index in range(count)]
        if len(set(ranks)) < 2:
            return False
        groups: dict[int | None, list[int]] = {}
        for index, rank in enumerate(ranks):
            groups.setdefault(rank, []).append(index)
        pieces = _Pieces(
            ranks, groups, {rank: self._piece(node, chosen, count) for rank, chosen in groups.items()}
        )
        self._pieces[node] = pieces
        return True

    def _rank_of_element(self, items: Sequence[Any]) -> int | None:
        found = {self.home[self._new[item]] for item in items if isinstance(item, fx.Node)} - {None}
        return found.pop() if len(found) == 1 else None

    def _piece(self, node: fx.Node, chosen: Sequence[int], count: int) -> fx.Node:
        def part(item: Any) -> Any:
            is_list = isinstance(item, (list, tuple)) and len(item) == count
            return type(item)([item[index] for index in chosen]) if is_list else item

        args = fx.map_arg(tuple(map(part, node.args)), self._new.__getitem__)
        kwargs = fx.map_arg(dict(node.kwargs), self._new.__getitem__)
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        come_from(made, node)
        described = value(node)
        if _is_list(described):
            set_value(made, tuple(described[index] for index in chosen))  # type: ignore[index]
        else:
            set_value(made, tuple(part(item) for item in described))  # type: ignore[union-attr]
        self._settle(made)
        return made

    def _item_of_pieces(self, node: fx.Node) -> bool:
        """Write what is taken out of such an op."""
        if node.target is not getitem or node.args[0] not in self._pieces:
            return False
        pieces, index = self._pieces[node.args[0]], node.args[1]  # type: ignore[index]
        assert isinstance(index, int)
        if _is_list(value(node)):  # one of the lists that it gives
            self._pieces[node] = _Pieces(
                pieces.ranks,
                pieces.groups,
                {rank: self._item(node, piece, index) for rank, piece in pieces.made.items()},
            )
        elif pieces.gives_lists:  # a flag that all elements have in common
            flags = [self._item(node, piece, index) for piece in pieces.made.values()]
            self._new[node] = self._joined(node, flags)
        else:
            rank = pieces.ranks[index]
            self._new[node] = self._item(node, pieces.made[rank], pieces.groups[rank].index(index))
        return True

    def _item(self, like: fx.Node, source: fx.Node, index: int) -> fx.Node:
        described = value(source)
        assert isinstance(described, tuple)
        made = self.graph.call_function(getitem, (source, index))
        come_from(made, like)
        set_value(made, described[index])
        self._settle(made)
        return made

    def _joined(self, like: fx.Node, flags: Sequence[fx.Node]) -> fx.Node:
        """1 if one of them is: what the op says of all elements."""
        made = flags[0]
        for flag in flags[1:]:
            both = self.graph.call_function(_aten.maximum.default, (made, flag))
            come_from(both, like)
            set_value(both, value(like))
            self._settle(both)
            made = both
        return made


@dataclass(frozen=True)
class _Pieces:
    """An op on lists as one for each rank: the rank of each element, the elements of each rank, and the ops."""

    ranks: Sequence[int | None]
    groups: Mapping[int | None, Sequence[int]]
    made: Mapping[int | None, fx.Node]

    @property
    def gives_lists(self) -> bool:
        return any(not _is_list(value(piece)) for piece in self.made.values())


def _works_by_element(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", ""))
    return name.startswith("_foreach_") or node.target is _CHECK or node.target in FUSED


def _is_item(user: fx.Node) -> bool:
    return user.target is getitem and isinstance(user.args[1], int)


def _is_list(described: Any) -> bool:
    return isinstance(described, tuple) and all(isinstance(item, TensorMeta) for item in described)


def is_scalar(node: fx.Node) -> bool:
    """True for a tensor without dimensions."""
    described = value(node)
    return isinstance(described, TensorMeta) and not described.shape


def is_number(node: fx.Node) -> bool:
    """True for what is no tensor."""
    return not list(metas(value(node)))
