"""Small programs for unit tests, made by hand or drawn at random; no capture is involved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monograph.ir.meta import set_origin, set_value, tensor_meta
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.user_code.lines import Origin

aten = torch.ops.aten
SHAPE = (2, 3)


class Sketch:
    """Builds a program op by op."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Port] = []

    def input(self, path: str, role: Role = Role.USER) -> fx.Node:
        node = self.graph.placeholder(path.replace(".", "_"))
        set_value(node, tensor_meta(torch.empty(SHAPE)))
        self.inputs.append(Port(node.name, role, path))
        return node

    def op(self, target: Any, *args: Any, phase: str = "forward") -> fx.Node:
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        set_value(node, tensor_meta(torch.empty(SHAPE)))
        set_origin(node, Origin("model.py", 3, "fc", phase))
        return node

    def finish(self, outputs: Sequence[tuple[fx.Node, Role, str]]) -> Program:
        self.graph.output(tuple(node for node, _, _ in outputs))
        ports = tuple(Port(f"out{i}", role, path) for i, (_, role, path) in enumerate(outputs))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return Program("step", module, tuple(self.inputs), ports)


def small_program() -> Program:
    """y = relu(x * w); w becomes w + y; one op is dead."""
    sketch = Sketch()
    x, w = sketch.input("x"), sketch.input("model.w", Role.PARAM)
    product = sketch.op(aten.mul.Tensor, x, w)
    sketch.op(aten.neg.default, product)
    y = sketch.op(aten.relu.default, product)
    new = sketch.op(aten.add.Tensor, w, y, phase="update")
    return sketch.finish([(y, Role.USER, "result.0"), (new, Role.STATE, "model.w")])


_UNARY = (aten.relu.default, aten.neg.default, aten.sin.default, aten.clone.default)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program over two inputs and one state tensor."""
    sketch = Sketch()
    values = [sketch.input("x"), sketch.input("y"), sketch.input("model.w", Role.PARAM)]
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            values.append(sketch.op(draw(st.sampled_from(_UNARY)), draw(st.sampled_from(values))))
        else:
            pair = draw(st.sampled_from(values)), draw(st.sampled_from(values))
            values.append(sketch.op(draw(st.sampled_from(_BINARY)), *pair))
    if draw(st.booleans()):
        values.append(sketch.op(aten.bernoulli.p, values[-1], 0.5))
    made = values[3:]
    new = sketch.op(aten.add.Tensor, draw(st.sampled_from(values)), draw(st.sampled_from(made)))
    return sketch.finish([(draw(st.sampled_from(made)), Role.USER, "result.0"), (new, Role.STATE, "model.w")])


def interpret(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a program by torch's own interpreter, as an independent reference."""
    torch.manual_seed(0)
    results: tuple[Any, ...] = fx.Interpreter(program.module).run(*inputs)
    return results


def example_inputs(program: Program) -> list[torch.Tensor]:
    """Fixed inputs of the programs' shape."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator) for _ in program.inputs]
