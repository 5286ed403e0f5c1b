"""Random steps with a forward and a backward, with views, random draws and several results; and their problems."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monograph.ir.meta import origin, set_origin
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.passes.dce import dce
from monograph.recompute.problem import Problem
from monograph.user_code.lines import Origin
from tests.plan.drawn import Drawing
from tests.plan.drawn import programs as plain_programs

aten = torch.ops.aten
_SAME = (aten.neg.default, aten.sin.default, aten.relu.default, aten.exp.default)
_WIDTH = 4
_MOST_ROWS = 64


@st.composite
def steps(draw: st.DrawFn, most: int = 12) -> Program:
    """Layers of random kinds, and for each a gradient that reads what it read and made, from the last one back."""
    random = Random(draw(st.integers(0, 2**32)))
    return step_of(random, random.randint(most // 2, most))


def step_of(random: Random, count: int) -> Program:
    """One of them: a shorter one is none that is easier to understand, so that a seed is enough."""
    drawing = Drawing()
    generator = torch.Generator().manual_seed(0)
    x = drawing.input("x", Role.USER, torch.randn(16, _WIDTH, generator=generator))
    w = drawing.input("model.w", Role.PARAM, torch.randn(_WIDTH, _WIDTH, generator=generator))
    values, layers = [x], list[tuple[fx.Node, ...]]()
    for _ in range(count):
        source = values[-1] if random.random() < 0.8 else random.choice(values[-3:])
        made = _layer(random, drawing, source, w, values)
        values.append(made)
        layers.append((source, made))
    position = len(drawing.graph.nodes)
    gradient = drawing.op(aten.mul.Tensor, drawing.op(aten.sum.default, values[-1]), 0.5)
    for source, made in reversed(layers):
        for item in random.choice(((source,), (made,), (source, made))):
            large = drawing.op(aten.mul.Tensor, item, gradient) if random.random() < 0.5 else item
            gradient = drawing.op(
                aten.tanh.default, drawing.op(aten.add.Tensor, drawing.op(aten.sum.default, large), gradient)
            )
    new = drawing.op(aten.sub.Tensor, w, gradient)
    for index, node in enumerate(drawing.graph.nodes):
        if index >= position:
            set_origin(node, Origin("model.py", 4, "fc", "update" if node is new else "backward"))
    outputs = [(gradient, Role.USER, "result.0"), (new, Role.STATE, "model.w")]
    if random.random() < 0.2:
        outputs.append((random.choice(values[1:]), Role.USER, "result.1"))
    return dce(drawing.finish(outputs))


def _layer(
    random: Random, drawing: Drawing, source: fx.Node, w: fx.Node, values: Sequence[fx.Node]
) -> fx.Node:
    rows = drawing.made[source].shape[0]
    like = [item for item in values if drawing.made[item].shape == drawing.made[source].shape]
    match random.choice(
        ("same", "same", "same", "product", "product", "wide", "narrow", "sum", "view", "drop", "largest")
    ):
        case "product":
            return drawing.op(aten.mm.default, source, w)
        case "wide" if rows * 2 <= _MOST_ROWS:
            return drawing.op(aten.cat.default, [source, source])
        case "narrow" if rows > 1:
            half = drawing.op(aten.slice.Tensor, source, 0, 0, rows // 2)
            return drawing.op(aten.clone.default, half)
        case "sum":
            return drawing.op(aten.add.Tensor, source, random.choice(like))
        case "view":
            return drawing.op(aten.view.default, drawing.op(aten.sin.default, source), [rows, _WIDTH])
        case "drop":
            drawn = drawing.op(aten.bernoulli.p, source, 0.5)
            return drawing.op(aten.mul.Tensor, source, drawn)
        case "largest":
            pair = drawing.op(aten.sort.default, source)
            return drawing.op(operator.getitem, pair, 0)
    return drawing.op(random.choice(_SAME), source)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program, whose ops are of backward from some position on."""
    program: Program = draw(plain_programs())
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    first = draw(st.integers(0, len(nodes)))
    for node in nodes[first:]:
        place = origin(node)
        set_origin(node, Origin(place.file, place.line, place.module, "backward"))
    return dce(program)


def inputs_of(program: Program) -> list[torch.Tensor]:
    """Real tensors for the inputs, the same each time."""
    generator = torch.Generator().manual_seed(1)
    nodes = program.graph.find_nodes(op="placeholder")
    return [torch.randn(tuple(node.meta["value"].shape), generator=generator) for node in nodes]


def run(program: Program) -> Any:
    """What torch's own interpreter gives, from the same random numbers each time."""
    torch.manual_seed(3)
    return fx.Interpreter(program.module).run(*inputs_of(program))


def drawn_seconds(draw: st.DrawFn, problem: Problem) -> list[float]:
    """Random times of the units."""
    random = Random(draw(st.integers(0, 2**32)))
    return [float(random.randint(1, 1_000)) for _ in problem.units]
