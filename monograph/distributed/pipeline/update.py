"""The update of a step on one rank: its own parameters, round by round, with what all ranks need in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.distributed.pipeline.homes import Homes, is_number, is_scalar
from monograph.distributed.pipeline.parts import Part, check_sent, part_of
from monograph.distributed.pipeline.transfers import Writer
from monograph.errors import DistributedError
from monograph.ir.meta import UPDATE_PHASE, TensorMeta, needed_by, origin, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program

Call = Callable[[Part, Sequence[fx.Node], str], list[fx.Node]]


class Update:
    """An update over ranks. Which ops are where, and what is sent to all, is the same on all ranks."""

    def __init__(self, program: Program, rank_of: Callable[[Port], int | None], num_ranks: int) -> None:
        self.homes = Homes(program, rank_of)
        self.num_ranks = num_ranks
        self.late: dict[tuple[Role, str], Any] = {}  # what it makes, by role and path
        on_all = {port.path for node, port in self.homes.ports.items() if self.homes.home[node] is None}
        for item, port in self.homes.outputs:
            self.late[port.role, port.path] = item
            if isinstance(item, fx.Node):
                goes_to_all = port.path in on_all if port.role is Role.STATE else is_scalar(item)
                if goes_to_all:
                    self.homes.send(item)
        live = needed_by(item for item, _ in self.homes.outputs if isinstance(item, fx.Node))
        self.sent = [
            node for node in self.homes.split.graph.nodes if node in self.homes.sent and node in live
        ]
        for node in self.sent:
            if is_number(node):
                place = origin(node)
                raise DistributedError(
                    "the update of parameters of several stages needs a number of Python that is read out of one of them: "
                    f"{node.name}",
                    where=place if place.file else None,
                    hint="compute it with tensors, or use an optimizer that does",
                )

    def home(self, port: Port) -> int | None:
        """The rank that makes an output; None for all."""
        item = self.late[port.role, port.path]
        return self.homes.home[item] if isinstance(item, fx.Node) else None

    def read_by(self, rank: int, wanted: Callable[[Port], bool]) -> set[str]:
        """The paths of the inputs that a rank reads to make what is wanted of it."""
        found = self._needed(rank, [item for item, port in self.homes.outputs if wanted(port)])
        return {self.homes.ports[node].path for node in found if node in self.homes.ports}

    def _needed(self, rank: int, outputs: Sequence[Any]) -> set[fx.Node]:
        """What a rank computes, without what comes from others, and the inputs that it reads."""
        homes = self.homes
        pending = [item for item in outputs if isinstance(item, fx.Node)]
        pending += [node for node in self.sent if homes.home[node] == rank]
        found: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in found and homes.home[node] in (None, rank):
                found.add(node)
                pending += node.all_input_nodes
        return found

    def write(
        self,
        writer: Writer,
        rank: int,
        wanted: Callable[[Port], bool],
        given: Mapping[str, fx.Node],
        call: Call,
    ) -> tuple[dict[tuple[Role, str], fx.Node], list[Program]]:
        """Write the update of a rank, which is `given` inputs by path; gives what is wanted, and the parts that `call` calls."""
        homes, known = self.homes, dict[fx.Node, fx.Node]()
        outputs = [(item, port) for item, port in homes.outputs if wanted(port) and isinstance(item, fx.Node)]
        needed = self._needed(rank, [item for item, _ in outputs])
        known |= {node: given[port.path] for node, port in homes.ports.items() if node in needed}
        parts = []
        rounds = [self._round(number, needed) for number in range(homes.rounds)]
        readers = [{item for node in nodes for item in node.all_input_nodes} - nodes for nodes in rounds]
        for number, nodes in enumerate(rounds):
            late = set[fx.Node]().union(*readers[number + 1 :])
            later = [
                node
                for node in homes.split.graph.nodes
                if node in nodes and node in late and homes.round[node] == number
            ]
            sent = [node for node in self.sent if homes.round[node] == number]
            own = [node for node in sent if homes.home[node] == rank and node in nodes]
            results = [
                (item, port) for item, port in outputs if item in nodes and homes.round[item] == number
            ]
            passed: list[tuple[fx.Node, Port | None]] = [
                (node, None) for node in dict.fromkeys([*later, *own])
            ]
            if made := [*results, *passed]:
                name = "update" if homes.rounds == 1 else f"update_{number}"
                part = part_of(name, homes.split, nodes, homes.ports, made)
                values = call(part, [known[node] for node in part.given], f"{name}_made")
                known |= {item: node for (item, _), node in zip(made, values, strict=True)}
                parts.append(part.program)
            self._send_to_all(writer, rank, sent, known, number)
        return {(port.role, port.path): known[item] for item, port in outputs}, parts

    def _round(self, number: int, needed: set[fx.Node]) -> set[fx.Node]:
        """What is computed in a round, with the numbers of earlier ones that it reads: these are no values to be given."""
        homes = self.homes
        nodes = {node for node in needed if homes.round[node] == number and node not in homes.ports}
        pending = list(nodes)
        while pending:
            for item in pending.pop().all_input_nodes:
                if item not in nodes and item in needed and item not in homes.ports and is_number(item):
                    nodes.add(item)
                    pending.append(item)
        return nodes

    def _send_to_all(
        self, writer: Writer, rank: int, sent: Sequence[fx.Node], known: dict[fx.Node, fx.Node], number: int
    ) -> None:
        """Scalars of one type are gathered at once; anything else is sent by itself."""
        kinds: dict[tuple[torch.dtype, torch.device], list[fx.Node]] = {}
        for node in sent:
            form = check_sent(node)
            if is_scalar(node):
                kinds.setdefault((form.dtype, form.device), []).append(node)
                continue
            source = self._home(node)
            name = f"{node.name}_of_{source}"
            everywhere = writer.from_one(
                known[node] if source == rank else None, form, source, name, UPDATE_PHASE
            )
            known[node] = everywhere
        for index, alike in enumerate(kinds.values()):
            by_rank = [
                [node for node in alike if self._home(node) == other] for other in range(self.num_ranks)
            ]
            like = replace(_tensor(alike[0]), requires_grad=False)
            own = [known[node] for node in by_rank[rank]]
            name = f"of_all_{number}_{index}"
            found = writer.from_each(own, [len(nodes) for nodes in by_rank], like, name, UPDATE_PHASE)
            for nodes, values in zip(by_rank, found, strict=True):
                known |= dict(zip(nodes, values, strict=True))

    def _home(self, node: fx.Node) -> int:
        found = self.homes.home[node]
        assert found is not None
        return found


def _tensor(node: fx.Node) -> TensorMeta:
    found = value(node)
    assert isinstance(found, TensorMeta)
    return found
