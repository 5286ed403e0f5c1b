"""What compiled code computes on its way: the step is compiled once more, with each value among its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.backends import LoweringRequest, lower
from monograph.compiler import Build
from monograph.inspect.walk import own_inputs
from monograph.ir.memory import is_view
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
    hidden = _hidden(program)
    exposed = _exposed(program, [node.name for node in hidden])
    copies = own_inputs(inputs)
    lowered = lower(LoweringRequest(make_plan(exposed), build.settings, (), lambda: own_inputs(inputs)))
    with torch.random.fork_rng(devices=()):
        made = rehearse(lowered.runner, exposed, copies)
    known = dict(zip([*hidden, *output_nodes(program.graph)], made, strict=True))
    return ((node, known[node]) for node in compute_nodes(program.graph) if node in known)


def _hidden(program: Program) -> list[fx.Node]:
    """The nodes whose tensors are no outputs. Views are left out: they have the memory of others."""
    outputs = set(output_nodes(program.graph))
    return [
        node
        for node in compute_nodes(program.graph)
        if node not in outputs and isinstance(value(node), TensorMeta) and not _is_view(node)
    ]


def _is_view(node: fx.Node) -> bool:
    maker = node.args[0] if node.target is getitem else node
    return isinstance(maker, fx.Node) and is_view(maker)


def _exposed(program: Program, names: Sequence[str]) -> Program:
    copy = program.rebuilt()
    by_name = {node.name: node for node in copy.graph.nodes}
    output = copy.graph.output_node()
    output.args = ((*(by_name[name] for name in names), *output_nodes(copy.graph)),)
    ports = tuple(Port(f"value{number}", Role.USER, f"value.{name}") for number, name in enumerate(names))
    return replace(copy.with_graph(copy.graph), outputs=ports + copy.outputs)
