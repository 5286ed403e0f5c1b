"""Random programs with views, lists of results and ops of unknown kind; and a real run of a plan."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monograph.ir.meta import TensorMeta, describe, set_origin, set_value, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.plan.plan import Plan
from monograph.user_code.lines import Origin
from tests.support.programs import Sketch

aten = torch.ops.aten
STATES = ("model.w", "model.v", "optimizer.0/model.w/m")


class Drawing(Sketch):
    """Builds a program op by op, and runs each op to know what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[fx.Node, Any] = {}

    def input(self, path: str, role: Role, tensor: torch.Tensor) -> fx.Node:
        """A placeholder for a tensor like this one."""
        node = self.graph.placeholder("".join(c if c.isalnum() else "_" for c in path))
        self.inputs.append(Port(node.name, role, path))
        return self._keep(node, tensor)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an op with nodes and constants."""
        node = self.graph.call_function(target, args, kwargs)
        set_origin(node, Origin("model.py", 3, "fc", "forward"))
        return self._keep(node, target(*fx.map_arg(args, self.made.__getitem__), **kwargs))

    def _keep(self, node: fx.Node, result: Any) -> fx.Node:
        self.made[node] = result
        set_value(node, describe(result))
        return node


def start() -> Drawing:
    """Two arguments and three pieces of state of one shape."""
    drawing = Drawing()
    generator = torch.Generator().manual_seed(0)
    for path in ("x", "y", *STATES):
        role = Role.PARAM if path in STATES else Role.USER
        drawing.input(path, role, torch.randn(2, 3, generator=generator))
    return drawing


_UNARY = (
    (aten.neg.default,),
    (aten.exp.default,),
    (aten.clone.default,),
    (aten.t.default,),
    (aten.detach.default,),
    (aten.slice.Tensor, 0, 0, 1),
    (aten.select.int, 0, -1),
    (aten.unsqueeze.default, 0),
    (aten.reshape.default, [-1]),  # a view or a copy: the planner does not know
    (aten.contiguous.default,),  # often its argument itself
    (aten.max.dim, 0),  # two results
    (aten.split.Tensor, 1),
    (aten.unsafe_split.Tensor, 1),  # views that the schema keeps silent about
)
SOMETIMES_VIEWS = (aten.reshape.default, aten.contiguous.default)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program; some of its results may share memory with its inputs and with each other."""
    drawing = start()
    values = list(drawing.made)
    for _ in range(draw(st.integers(2, 14))):
        one = draw(st.sampled_from(values))
        like = [item for item in values if drawing.made[item].shape == drawing.made[one].shape]
        if draw(st.booleans()):
            values.append(drawing.op(draw(st.sampled_from(_BINARY)), one, draw(st.sampled_from(like))))
            continue
        target, *constants = draw(st.sampled_from(_UNARY if drawing.made[one].dim() == 2 else _UNARY[:3]))
        node = drawing.op(target, one, *constants)
        if isinstance(drawing.made[node], (tuple, list)):
            for index in draw(st.sets(st.integers(0, len(drawing.made[node]) - 1), min_size=1)):
                item = drawing.op(operator.getitem, node, index)
                if drawing.made[item].is_floating_point():
                    values.append(item)
        else:
            values.append(node)
    made = [item for item in values if item.op != "placeholder"]
    if not made:
        made.append(drawing.op(aten.neg.default, values[0]))
    whole = [item for item in made if drawing.made[item].shape == (2, 3)]
    if not whole:
        whole.append(drawing.op(aten.add.Tensor, values[0], values[2]))
    outputs = [
        (draw(st.sampled_from(made)), Role.USER, f"result.{i}") for i in range(draw(st.integers(0, 2)))
    ]
    for path in STATES:
        new = draw(st.sampled_from(whole))
        if draw(st.booleans()):
            new = drawing.op(aten.mul.Tensor, new, draw(st.sampled_from(whole)))
        outputs.append((new, Role.STATE, path))
    return drawing.finish(outputs)


def fresh_inputs(program: Program) -> list[Any]:
    """Real tensors for the inputs, the same each time."""
    generator = torch.Generator().manual_seed(1)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [torch.randn(_shape(node), generator=generator) for node in nodes]


def _shape(node: fx.Node) -> tuple[int, ...]:
    described = value(node)
    assert isinstance(described, TensorMeta)
    return described.shape


@dataclass
class Enacted:
    """What a real run of a plan left behind."""

    results: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    held: list[tuple[int, int]] = field(default_factory=list)  # bytes at each op, and behind its frees


def enact(plan: Plan, inputs: Sequence[torch.Tensor], *, early: bool = True) -> Enacted:
    """Run a plan on real tensors, with its frees and its writes; those may wait for the end of the program.

    A value that is read after its free is a KeyError.
    """
    nodes = list(plan.program.graph.nodes)
    values: dict[str, Any] = {}
    outputs: Sequence[fx.Node] = plan.program.graph.output_node().args[0]  # type: ignore[assignment]
    state = {port.path: tensor for port, tensor in zip(plan.program.inputs, inputs, strict=True)}
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    waiting = iter(inputs)
    held = []
    for node in nodes:
        if node.op == "placeholder":
            values[node.name] = next(waiting)
        elif node.op == "call_function":
            arguments = fx.map_arg(node.args, lambda item: values[item.name])
            values[node.name] = node.target(*arguments)  # type: ignore[operator]
            del arguments
            running = _bytes(values, own)
            for name in plan.frees.get(node.name, ()):
                del values[name]
            held.append((running, _bytes(values, own)))
        for index, place in plan.in_place.items():
            if early and place.early == node.name:
                values[place.input].copy_(values[outputs[index].name])
    for index, place in reversed(plan.in_place.items()):
        if not early:
            values[place.input].copy_(values[outputs[index].name])
    results = [values[item.name].clone() for item in outputs]
    for index, port in plan.program.updates():
        if index not in plan.in_place:
            state[port.path].copy_(results[index])
    return Enacted(_shown(plan.program, results), state, held)


def expected(program: Program, inputs: Sequence[torch.Tensor]) -> Enacted:
    """The same by torch's own interpreter, which writes nothing."""
    results = fx.Interpreter(program.module).run(*inputs)
    state: Mapping[str, torch.Tensor] = {
        port.path: tensor for port, tensor in zip(program.inputs, inputs, strict=True)
    }
    state = {**state, **{port.path: results[index] for index, port in program.updates()}}
    return Enacted(_shown(program, results), dict(state))


def _shown(program: Program, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a caller gets to see."""
    return [tensor for tensor, port in zip(results, program.outputs, strict=True) if port.role is Role.USER]


def _bytes(values: Mapping[str, Any], own: set[int]) -> int:
    """Bytes of the storages that values hold, those of the inputs left out."""
    found: dict[int, int] = {}
    for item in values.values():
        for tensor in item if isinstance(item, (tuple, list)) else (item,):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(nbytes for key, nbytes in found.items() if key not in own)
