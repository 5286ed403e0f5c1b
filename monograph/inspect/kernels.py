"""What compiled code computes on its way: the step is compiled once more, with each value among its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.backends import Order, lower
from monograph.compiler import Build
from monograph.inspect.walk import own_inputs
from monograph.ir.meta import TensorMeta, compute_nodes, output_nodes, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.plan.plan import make_plan
from monograph.runtime.runner import rehearse


def run_kernels(build: Build, inputs: Sequence[Any]) -> list[Any]:
    """What a build gives for a copy of these inputs. State and random numbers stay as they are."""
    with torch.random.fork_rng(devices=()):
        return build.executor.rehearse(own_inputs(inputs))


def kernel_values(build: Build, program: Program, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
    """The tensors that the kernels of a build's backend compute for the nodes of `program`, in their order.

    Kernels that give a value away may be others than those that keep it to themselves: what only arises when ops are
    fused is not seen here.
    """
    exposed = _exposed(program)
    copies = own_inputs(inputs)
    lowered = lower(Order(make_plan(exposed), build.settings, (), lambda: own_inputs(inputs)))
    with torch.random.fork_rng(devices=()):
        made = rehearse(lowered.runner, exposed, copies)
    yield from zip(_tensors(program), made, strict=False)


def _tensors(program: Program) -> list[fx.Node]:
    return [node for node in compute_nodes(program.graph) if isinstance(value(node), TensorMeta)]


def _exposed(program: Program) -> Program:
    copy = program.rebuilt()
    nodes = _tensors(copy)
    output = copy.graph.output_node()
    output.args = ((*nodes, *output_nodes(copy.graph)),)
    ports = tuple(
        Port(f"value{number}", Role.USER, f"value.{node.name}") for number, node in enumerate(nodes)
    )
    return replace(copy.with_graph(copy.graph), outputs=ports + copy.outputs)
