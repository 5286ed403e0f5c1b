"""The update of each parameter as one op, for compilers that take a C++ function for it: one loop, one text for each kind."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_input
from monograph.elementwise.formulas import CALLED
from monograph.elementwise.kinds import C_TYPES, Writer, written_once
from monograph.elementwise.parts import Part, parts_of
from monograph.ir.meta import TensorMeta, come_from, set_value, value
from monograph.ir.own_ops import UPDATE
from monograph.ir.program import Program
from monograph.native.update import UPDATES, Update
from monograph.passes.inductor.foreach_to_single import foreach_to_single
from monograph.plan.plan import Plan, make_plan

aten = torch.ops.aten
_NUMBER = TensorMeta((), torch.float64, (), torch.device("cpu"))
# Of the functions that `exact` leaves to eager's kernels.
_INLINE: Mapping[Any, str] = {aten.sqrt.default: "root({})"}


def with_updates(plan: Plan, in_place: Collection[int]) -> Program:
    """The program of a plan in which each update of state is one op: at the end, but where something else reads its results.

    State at these positions of the outputs may be written in place; the rest has the same numbers.
    """
    single = foreach_to_single(plan.program)
    found = parts_of(plan if single is plan.program else make_plan(single), in_place, apart=True)
    places = {node: place for place, node in enumerate(single.graph.nodes)}
    parts = [part for part in found if _ends_before(part, places)]
    updates = list(written_once(parts, _OneLoop, lambda writer: writer.update))
    return _replaced(single, updates) if updates else plan.program


def _readers(part: Part) -> list[fx.Node]:
    """The ops that read results of a part."""
    inside = {*part.nodes}
    return [user for node in part.nodes for user in node.users if user not in inside and user.op != "output"]


def _ends_before(part: Part, places: Mapping[fx.Node, int]) -> bool:
    """True if nothing reads a result of a part before all of them are there."""
    return all(places[user] > places[part.nodes[-1]] for user in _readers(part))


def _replaced(program: Program, updates: Sequence[tuple[_OneLoop, Update]]) -> Program:
    gone = {node for writer, _ in updates for node in writer.part.nodes}
    graph, new, rows = fx.Graph(), dict[fx.Node, fx.Node](), dict[tuple[fx.Node, ...], fx.Node]()
    end = program.graph.output_node()
    before: dict[fx.Node, list[tuple[_OneLoop, Update]]] = {}
    for writer, update in updates:
        part = writer.part
        before.setdefault(part.nodes[-1] if _readers(part) else end, []).append((writer, update))
    for node in program.graph.nodes:
        for writer, update in before.get(node, ()):
            given = tuple(writer.given)
            if given not in rows:
                rows[given] = _row(graph, given, new, writer.part.nodes[-1])
            _emit(graph, writer, update, new, rows[given])
        if node not in gone:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = dict(node.meta)
    return program.with_graph(graph)


def _row(
    graph: fx.Graph, numbers: Sequence[fx.Node], new: Mapping[fx.Node, fx.Node], like: fx.Node
) -> fx.Node:
    """Numbers as a tensor, in float64."""

    def emit(target: Any, *args: Any, shape: tuple[int, ...], **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        come_from(made, like)
        set_value(made, replace(_NUMBER, shape=shape, stride=(1,) * len(shape)))
        return made

    if not numbers:
        return emit(aten.full.default, [1], 0, dtype=torch.float64, shape=(1,))
    single = [emit(aten.scalar_tensor.default, new[node], dtype=torch.float64, shape=()) for node in numbers]
    return emit(aten.stack.default, single, shape=(len(single),))


def _emit(
    graph: fx.Graph, writer: _OneLoop, update: Update, new: dict[fx.Node, fx.Node], row: fx.Node
) -> None:
    """An update as an op, and its results."""
    part = writer.part
    tensors = [new[node] for node in writer.slots]
    written = [writer.slots.index(state) for state in part.writes.values()]
    made = graph.call_function(UPDATE, (tensors, row, written, update.name))
    come_from(made, part.nodes[-1])
    set_value(made, tuple(value(node) for node in part.writes))
    for index, node in enumerate(part.writes):
        new[node] = graph.call_function(operator.getitem, (made, index))
        new[node].meta = dict(node.meta)


class _OneLoop(Writer):
    """Writes the whole update of a part as one function. Its formulas are the likeliest of eager's, which nothing proves here."""

    def __init__(self, part: Part) -> None:
        super().__init__(part, lambda node: 0)
        self._called = []
        self._level = dict.fromkeys(self._loops, 0)

    @property
    def update(self) -> Update:
        """The function. Raises LookupError if there is none."""
        types = tuple(self._type(node) for node in self.slots)
        texts = {"numbers": self._text(self._computed_numbers()), "loop": self._text(self._loop())}
        digest = hashlib.sha256(repr((types, texts)).encode()).hexdigest()[:16]
        name = f"monograph_update_{digest}"
        if name not in UPDATES:
            num_made, computed = len(self._made), _computed_by(self)
            UPDATES[name] = Update(name, types, num_made=num_made, computed=computed, **texts)
        return UPDATES[name]

    def _text(self, lines: Sequence[str]) -> str:
        which = ", ".join(map(str, range(len(self.given) + 1)))
        used = [
            f"using T = {C_TYPES[self._whole.dtype]};",
            f"const long item = 0, which[] = {{{which}}}; (void)item; (void)which;",
        ]
        return "".join(f"  {line}\n" for line in (*used, *lines))

    def _computed_numbers(self) -> list[str]:
        """Computes what loops need, and writes new state of one element."""
        made = [f"made[{index}] = {self._names[node]};" for index, node in enumerate(self._made)]
        lines = [*self._single_values(), *made, *self._single_writes()]
        return [line for line in lines if "return 1" not in line]

    def _loop(self) -> list[str]:
        """Writes new state from `start` on."""
        writes = {node: state for node, state in self.part.writes.items() if self._is_whole(node)}
        needed = self._needed(list(writes), set())
        inside = self._loads([*needed, *writes], set())
        inside += [f"const T {self._names[node]} = {self._element(node, set())};" for node in needed]
        inside += [f"{self._at(state)} = {self._names[node]};" for node, state in writes.items()]
        loop = ["#pragma omp simd", "for (long i = 0; i < count; i++) {", *inside, "}"]
        return [*self._outside(inside), *loop] if writes else []

    def _value(self, node: fx.Node, kind: str) -> str:
        if node.target in CALLED:
            return _INLINE[node.target].format(self._spelled(node.args[0], kind))
        return super()._value(node, kind)


def _computed_by(writer: _OneLoop) -> Any:
    """What computes the new state op by op, from tensors and then numbers of no dimension."""
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    for node in (*writer.slots, *writer.given):
        new[node] = named_input(graph, node.name)
    for node in writer.part.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        new[node].meta = {}
    graph.output([new[node] for node in writer.part.writes])
    module = fx.GraphModule({}, graph)

    def computed(tensors: Sequence[torch.Tensor], numbers: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = module(*tensors, *numbers[: len(writer.given)].tolist())
        return made

    return computed
