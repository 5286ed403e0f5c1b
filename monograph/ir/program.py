"""Program: a functional `torch.fx` graph with typed ports. State goes in, new state comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx, nn

from monograph.ir.meta import compute_nodes
from monograph.ir.port import Port, Role
from monograph.ir.printer import HEADER, program_code

__all__ = ["Port", "Program", "Role"]


@dataclass(frozen=True)
class Program:
    """A pure function of its inputs. `inputs` and `outputs` follow the order of the graph's border."""

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
        return replace(self, module=fx.GraphModule(root, self.graph), parts=parts) if parts else self

    @property
    def programs(self) -> tuple[Program, ...]:
        """The parts, and the program itself."""
        return (*self.parts, self)

    def ops(self) -> Iterator[fx.Node]:
        """Every node that computes, those of the parts once."""
        for program in self.programs:
            yield from compute_nodes(program.graph)

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @cached_property
    def text(self) -> str:
        """The program as Python that runs."""
        return "\n".join([HEADER, *(part._code(notes=True) for part in self.programs)])

    def _code(self, *, notes: bool) -> str:
        return program_code(self.name, self.module, self.inputs, self.outputs, notes=notes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program: its ops, inputs and outputs, not the places in the user's files that they come from."""
        code = "\n".join(part._code(notes=False) for part in self.programs)
        return hashlib.sha256(code.encode()).hexdigest()

    def __str__(self) -> str:
        return self.text

    def updates(self) -> tuple[tuple[int, Port], ...]:
        """The outputs that are new state, with their positions."""
        return tuple((i, port) for i, port in enumerate(self.outputs) if port.role is Role.STATE)
