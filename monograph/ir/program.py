"""Program: a functional `torch.fx` graph with typed ports. State goes in, new state comes out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from monograph.ir.port import Port, Role
from monograph.ir.printer import program_code, program_text

__all__ = ["Port", "Program", "Role"]


@dataclass(frozen=True)
class Program:
    """A pure function of its inputs. `inputs` and `outputs` follow the order of the graph's border."""

    name: str
    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @cached_property
    def text(self) -> str:
        """The program as Python that runs."""
        return program_text(self.name, self.module, self.inputs, self.outputs)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program: its ops, inputs and outputs, not the places in the user's files that they come from."""
        return hashlib.sha256(
            program_code(self.name, self.module, self.inputs, self.outputs).encode()
        ).hexdigest()

    def __str__(self) -> str:
        return self.text

    def updates(self) -> tuple[tuple[int, Port], ...]:
        """The outputs that are new state, with their positions."""
        return tuple((i, port) for i, port in enumerate(self.outputs) if port.role is Role.STATE)
