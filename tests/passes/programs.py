"""Programs for the tests of passes: written by hand, or drawn at random; and what a caller can tell of a run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monograph.ir.meta import describe, set_origin, set_value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.numerics.judge import digests
from monograph.user_code.lines import Origin

aten = torch.ops.aten


@dataclass
class Sketch:
    """Writes a program op by op, and runs each op at once, so that it knows what the op gives."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)  # holds the branches of torch.cond
    ports: list[Port] = field(default_factory=list)
    made: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)

    def input(self, path: str, example: Any, role: Role = Role.USER) -> fx.Node:
        """An input, with the tensor or number that the program is run on."""
        node = self.graph.placeholder(path.replace(".", "_").replace("/", "_"))
        self.ports.append(Port(node.name, role, path))
        self.inputs.append(example)
        return self._note(node, example)

    def op(self, target: Any, *args: Any, phase: str = "forward", **kwargs: Any) -> fx.Node:
        """An op on what was made before."""
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        set_origin(node, Origin("model.py", 3, "fc", phase))
        values, options = fx.map_arg((args, kwargs), lambda item: self.made[item])
        return self._note(node, target(*values, **options))

    def _note(self, node: fx.Node, made: Any) -> fx.Node:
        self.made[node] = made
        set_value(node, describe(made))
        return node

    def shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of a tensor, None for a number."""
        made = self.made[node]
        return tuple(made.shape) if isinstance(made, torch.Tensor) else None

    def finish(self, *results: fx.Node, state: dict[str, fx.Node] | None = None) -> Program:
        """The program that returns `results` and new state by path."""
        state = state or {}
        self.graph.output((*results, *state.values()))
        ports = [Port(f"result_{i}", Role.USER, f"result.{i}") for i in range(len(results))]
        ports += [Port(f"new_{i}", Role.STATE, path) for i, path in enumerate(state)]
        return Program("step", fx.GraphModule(self.root, self.graph), tuple(self.ports), tuple(ports))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Fixed numbers of a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(program: Program, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a program by torch's own interpreter, as an independent reference."""
    torch.manual_seed(0)
    with torch.no_grad():
        results: tuple[Any, ...] = fx.Interpreter(program.module).run(*inputs)
    return results


def visible(program: Program, inputs: Sequence[Any]) -> dict[str, Any]:
    """All that a caller can tell of a run: bits, layouts, which results are one object, and which share memory."""
    results = run(program, inputs)
    everything = [*results, *inputs]
    memory = [
        item.untyped_storage().data_ptr() if isinstance(item, torch.Tensor) else None for item in everything
    ]
    return {
        "bits": digests(results),
        "layout": [
            (item.stride(), item.storage_offset()) if isinstance(item, torch.Tensor) else None
            for item in results
        ],
        "objects": [[a is b for b in everything] for a in results if isinstance(a, torch.Tensor)],
        "memory": [[a == b for b in memory] for a in memory],
        "random": torch.get_rng_state().tolist(),
    }


def body(program: Program) -> str:
    """The ops of a program without the names of its ports and the notes."""
    lines = program.text.splitlines()
    start = lines.index("):")
    return "\n".join(line.partition("  # ")[0].rstrip() for line in lines[start + 1 :])


# --- at random ---------------------------------------------------------------------------------------------------------

Draw = Callable[[Sketch, st.DrawFn, list[fx.Node]], "fx.Node | None"]
_VIEWS = (aten.detach.default, aten.alias.default, aten.t.default)
_UNARY = (
    *_VIEWS,
    aten.clone.default,
    aten.neg.default,
    aten.sin.default,
    aten.relu.default,
    aten.sqrt.default,
)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.maximum.default)
_NUMBERS = (operator.add, operator.sub, operator.mul)


def _one(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node:
    return sketch.op(draw(st.sampled_from(_UNARY)), draw(st.sampled_from(tensors)))


def _two(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node | None:
    a = draw(st.sampled_from(tensors))
    same = [item for item in tensors if sketch.shape(item) == sketch.shape(a)]
    return sketch.op(draw(st.sampled_from(_BINARY)), a, draw(st.sampled_from(same)))


def _product(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node | None:
    a = draw(st.sampled_from(tensors))
    (_, inner) = sketch.shape(a) or (0, 0)
    fitting = [item for item in tensors if (sketch.shape(item) or (0,))[0] == inner]
    return sketch.op(aten.mm.default, a, draw(st.sampled_from(fitting))) if fitting else None


def _there_and_back(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node:
    a = draw(st.sampled_from(tensors))
    rows, columns = sketch.shape(a) or (0, 0)
    way = draw(st.integers(0, 4))
    if way == 0:
        return sketch.op(aten.squeeze.dim, sketch.op(aten.unsqueeze.default, a, 1), 1)
    if way == 1:
        flat = sketch.op(
            aten.view.default, sketch.op(aten.clone.default, a, memory_format=torch.contiguous_format), [-1]
        )
        return sketch.op(aten.view.default, flat, [rows, columns])
    if way == 2:
        return sketch.op(aten.slice.Tensor, a, 0, 0, 9223372036854775807)
    if way == 3:
        return sketch.op(aten._to_copy.default, a, dtype=torch.float32)
    return sketch.op(aten.copy.default, a, sketch.op(aten.neg.default, a))


def _several(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node:
    pair = sketch.op(aten.max.dim, draw(st.sampled_from(tensors)), 0, True)
    row = sketch.op(operator.getitem, pair, 0)
    _, columns = sketch.shape(row) or (0, 0)
    return sketch.op(aten.expand.default, row, [2, columns])


def _scaled(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node:
    known = [node for node, made in sketch.made.items() if isinstance(made, float)]
    number: Any = draw(st.sampled_from([*known, 0.5, 3.0, 1.0]))
    for _ in range(draw(st.integers(0, 3))):
        number = sketch.op(draw(st.sampled_from(_NUMBERS)), number, draw(st.sampled_from([*known, 2.0, 1.0])))
    return sketch.op(aten.mul.Tensor, draw(st.sampled_from(tensors)), number)


def _random(sketch: Sketch, draw: st.DrawFn, tensors: list[fx.Node]) -> fx.Node:
    return sketch.op(aten.bernoulli.p, draw(st.sampled_from(tensors)), 0.5)


_KINDS: tuple[Draw, ...] = (_one, _one, _two, _two, _product, _there_and_back, _several, _scaled, _random)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Any]]:
    """A random program with its inputs: matrices and a number that moves go in, results and new state come out."""
    sketch = Sketch()
    x = sketch.input("x", numbers(2, 3))
    w = sketch.input("model.w", numbers(3, 3, seed=1), Role.PARAM)
    v = sketch.input("model.v", numbers(3, 3, seed=2), Role.PARAM)
    rate = sketch.input("optimizer.0/group0/lr", 0.1, Role.HYPER)
    tensors = [x, w, v]
    for _ in range(draw(st.integers(2, 14))):
        made = draw(st.sampled_from(_KINDS))(sketch, draw, tensors)
        if made is not None and len(sketch.shape(made) or ()) == 2:
            tensors.append(made)
            if draw(st.booleans()):  # the same again: something for cse to find
                counterpart = sketch.graph.node_copy(made)
                counterpart.meta = dict(made.meta)
                sketch.made[counterpart] = sketch.made[made]
                tensors.append(counterpart)
    new = {}
    for path, parameter in (("model.w", w), ("model.v", v)):
        gradients = [item for item in tensors if sketch.shape(item) == (3, 3)]
        gradient = draw(st.sampled_from(gradients))
        decayed = sketch.op(aten.mul.Tensor, parameter, 0.9, phase="update")
        step = sketch.op(aten.mul.Tensor, gradient, rate, phase="update")
        new[path] = sketch.op(aten.sub.Tensor, decayed, step, phase="update")
    candidates = tensors[3:] or tensors  # drawn by number: Hypothesis keeps what its lists are made of
    results = draw(st.lists(st.integers(0, len(candidates) - 1), min_size=1, max_size=3))
    return sketch.finish(*[candidates[number] for number in results], state=new), sketch.inputs
