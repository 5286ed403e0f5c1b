"""Program: a functional `torch.fx` graph with typed ports. State goes in, new state comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx, nn

from monograph.compat.traces.nodes import copied_graph, graph_module
from monograph.ir.meta import compute_nodes
from monograph.ir.port import Port, Role
from monograph.ir.printer import HEADER, program_code
from monograph.ir.text import Displayed, Text, count_text

__all__ = ["Port", "Program", "Role"]


@dataclass(frozen=True)
class Program(Displayed):
    """A pure function of its inputs. `inputs` and `outputs` follow the order of the graph signature."""

    name: str
    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parts: tuple[Program, ...] = ()  # programs that it calls by their names, each pure as well

    def with_parts(self, parts: tuple[Program, ...]) -> Program:
        """The same program calling other parts of the same names."""
        root = nn.Module()
        for part in parts:
            root.add_module(part.name, part.module)
        return replace(self, module=graph_module(root, self.graph), parts=parts) if parts else self

    def with_graph(self, graph: fx.Graph) -> Program:
        """The same program with other nodes."""
        return replace(self, module=graph_module(self.module, graph))

    def rebuilt(
        self, nodes: Iterable[fx.Node] | None = None, instead: Mapping[fx.Node, Any] | None = None
    ) -> Program:
        """A copy with a graph of its own, to be changed in place or kept.

        `nodes` are the nodes that stay, in their new order, the output last; by default all of them. What reads a key
        of `instead` reads its value in the copy, an earlier node or a number, and the key itself is left out.
        """
        kept = list(self.graph.nodes if nodes is None else nodes)
        return self.with_graph(copied_graph(kept, instead or {}))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The subgraphs, and the program itself."""
        return (*self.parts, self)

    def ops(self) -> Iterator[fx.Node]:
        """Every node that computes, those of the subgraphs once."""
        for program in self.programs:
            yield from compute_nodes(program.graph)

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @cached_property
    def input_paths(self) -> dict[str, str]:
        """The path of each input by the name of its node."""
        return {port.name: port.path for port in self.inputs}

    @cached_property
    def text(self) -> Text:
        """The program as Python that runs."""
        return Text("\n".join([HEADER, *(part._code(notes=True) for part in self.programs)]))

    def _code(self, *, notes: bool) -> str:
        return program_code(self.name, self.module, self.inputs, self.outputs, notes=notes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program: its ops, inputs and outputs, not the places in the user's files that they come from."""
        code = "\n".join(part._code(notes=False) for part in self.programs)
        return hashlib.sha256(code.encode()).hexdigest()

    def __str__(self) -> str:
        return str(self.text)

    def __repr__(self) -> str:
        counts = ((len(self.inputs), "input"), (len(list(self.ops())), "op"), (len(self.outputs), "output"))
        return f"<Program {self.name}: {', '.join(count_text(*item) for item in counts)}; print() shows it>"

    def updates(self) -> tuple[tuple[int, Port], ...]:
        """The outputs that are new state, with their positions."""
        return tuple((i, port) for i, port in enumerate(self.outputs) if port.role is Role.STATE)
