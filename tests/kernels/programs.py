"""Small programs with the kernels that the tests choose for them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import fx

from monograph.ir.meta import compute_nodes, set_origin, set_value, tensor_meta
from monograph.ir.own_ops import NATIVE
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.kernels.candidates import fitting, form_of
from monograph.kernels.compile import KernelCompiler, kernel_at, kernels_in
from monograph.kernels.own import OWN
from monograph.kernels.select import written
from monograph.settings import Settings
from monograph.user_code.lines import Origin

aten = torch.ops.aten
COMPILED = Settings(backend="inductor")


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def program_of(function, *tensors: torch.Tensor) -> Program:
    """A program of the calls that `function(op, *tensors)` makes by `op(target, *args)`."""
    graph = fx.Graph()
    real: dict[fx.Node, object] = {}

    def note(node, result):
        real[node] = result
        described = (
            tuple(tensor_meta(item) if item is not None else None for item in result)
            if isinstance(result, tuple)
            else tensor_meta(result)
        )
        set_value(node, described)
        return node

    def op(target, *args, **kwargs):
        node = graph.create_node(
            "call_function", target, args, kwargs, name=target.__name__.partition(".")[0]
        )
        set_origin(node, Origin("model.py", 7, "fc", "forward"))
        arguments, options = fx.map_arg((args, kwargs), real.__getitem__)
        return note(node, target(*arguments, **options))

    inputs = [note(graph.placeholder(f"x{i}"), tensor) for i, tensor in enumerate(tensors)]
    results = function(op, *inputs)
    results = results if isinstance(results, tuple) else (results,)
    graph.output(results)
    ports = tuple(Port(node.name, Role.USER, node.name) for node in inputs)
    outputs = tuple(Port(f"out{i}", Role.USER, f"result.{i}") for i in range(len(results)))
    program = Program("step", fx.GraphModule(torch.nn.Module(), graph), ports, outputs)
    verify(program, after="the test")
    return program


def forced(table, name):
    """The table with one challenger only."""
    return {op: tuple(item for item in items if item.name == name) for op, items in table.items()}


def favour(monkeypatch, name):
    """Trials in which the form of this name is the fastest."""
    monkeypatch.setattr(
        "monograph.kernels.select.seconds_of",
        lambda forms, *_: {form.name: 1.0 if form.name == name else 2.0 for form in forms},
    )


def targets(program: Program) -> list[str]:
    return [node.target.__name__ for node in compute_nodes(program.graph)]


@torch.library.custom_op("kernel_test::slow_mm", mutates_args=())
def slow_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return a @ b


@slow_mm.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def run(program: Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return fx.Interpreter(program.module).run(*tensors)


def rewritten(program):
    """The program with our ops wherever they fit."""
    forms = {}
    for node in program.ops():
        for item in fitting(node, OWN.get(node.target, ())):
            forms[node.name] = form_of(node, item)
    return written(program, forms)


def with_code(program):
    """The program with our code in the place of our ops."""
    changed = program.rebuilt()
    workshop = KernelCompiler(kernels_in(changed.graph))
    for node in changed.graph.nodes:
        if node.op == "call_function" and node.target in NATIVE:
            node.target = workshop.compiled(kernel_at(node)).once
    return changed


def images(*shape):
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last)


def steps(tensor):
    """Its strides, but for dimensions of one element, where they mean nothing."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
