"""Values of tensors that Python asks for while a step is captured, where they are known before the step runs.

What is computed from arguments and state alone has its value as soon as the step is called. The recorded ops that lead
to it are run on the real tensors, and Python gets what eager mode would give it. The same ops are kept as a small
program: a build serves the steps for which it gives the same. What the model computes from its arguments and its
parameters is not known before; asking for that is refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.arithmetic import OPERATIONS, Branches
from monograph.capture.numbers.known import evaluated, is_constant, part_that_makes, written_roots
from monograph.capture.numbers.moving import is_moving, value_of
from monograph.capture.numbers.random import (
    can_be_repeated,
    draws,
    nothing_drawn,
    with_draws_before,
)
from monograph.capture.tensors.fakes import Inputs
from monograph.capture.tensors.reading_program import (
    ITEM,
    Op,
    Reading,
    ReadingProgram,
    RecordedPart,
    placeholders,
)
from monograph.compat.fakes import is_fake
from monograph.compat.modes import outside_of_modes, without_function_mode
from monograph.compat.symbolic_numbers import symbol_name
from monograph.compat.tensors import storage_key
from monograph.compat.traces.nodes import last_node, traced_node
from monograph.ir.call.numbers import spell_number
from monograph.ir.call.signature import Spec
from monograph.ir.graph_signature import Argument, Fixed
from monograph.ir.meta import describe
from monograph.ir.port import Role
from monograph.user_code.lines import user_place

_aten = torch.ops.aten
READ = "the value of a tensor that is read"  # begins the message about a reading
UNKNOWN = type("Unknown", (), {"__repr__": lambda _self: "unknown"})()
# inputs that have their value before the step; others are made by the step, or are numbers of optimizers
_BEFORE = frozenset({Role.USER, Role.PARAM, Role.BUFFER, Role.CAPTURED, Role.HYPER})
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes

_PLAIN: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.__int__: int,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__float__: float,
    torch.Tensor.__index__: operator.index,
}
_FEW = 16  # elements of a list whose items may move one by one

_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


@dataclass
class Readings:
    """The values that one trace has asked for. `branches` takes the conditions that they stay."""

    inputs: Inputs
    leaves: Sequence[Any]  # of the call
    branches: Branches
    allowed: bool  # False where a step runs on parts of its arguments
    found: dict[str, Reading] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)  # of items that move: the name of their reading
    present: dict[str, Any] = field(default_factory=dict)  # by the same names of symbols: the values
    sentences: dict[str, str] = field(default_factory=dict)  # conditions, for people
    tracer: Any = None
    silent: bool = False  # what is asked for now becomes a part of the program: a number, an assertion

    def __post_init__(self) -> None:
        self.program = ReadingProgram(self.inputs)
        self._given: _Known | None = None

    # --- what the trace asks ---------------------------------------------------------------------------------------

    def ask(self, ops: Sequence[Op], args: Sequence[Any], about: str = "") -> Any:
        """The number that ops on tensors give, on the condition that it stays; UNKNOWN if they are not known."""
        noted = self.note(ops, args)
        if noted is None:
            return UNKNOWN
        name, value = noted
        if name:
            text = f"same({name}, {spell_number(value)})"
            self.branches.note(text, (name,))
            self.sentences[text] = f"{self.about(name)} {about or f'is {value}'}"
        return value

    def is_within(self, ops: Sequence[Op], args: Sequence[Any], limit: Any) -> bool:
        """True if `limit` moves and the number that ops on tensors give is no larger, on the condition that it stays so."""
        noted = self.note(ops, args) if is_moving(limit) else None
        if noted is None:
            return False
        name, value = noted
        return bool((self.inputs.moving.leaf(name, value) if name else value) <= limit)

    def plain(self, func: Any, tensor: torch.Tensor) -> Any:
        """What `int(tensor)` and its like give, on the condition that it stays; UNKNOWN if it is not known."""
        kind = _PLAIN.get(func)
        if kind is None or tensor.numel() != 1:
            return UNKNOWN
        return self.ask((ITEM, (kind,)), (tensor,))

    def listed(self, tensor: torch.Tensor) -> Any:
        """`tensor.tolist()`, of few elements as numbers that move; UNKNOWN if the values are not known."""
        with without_function_mode(), outside_of_modes():
            values = UNKNOWN if tensor.numel() <= _FEW else self.whole(tensor)
            return values if values is UNKNOWN else values.tolist()

    def ask_item(self, number: Any, tensor: torch.Tensor) -> Any:
        """The present value of a number that the trace reads out of a tensor; None if it is not known."""
        noted = self.note((ITEM,), (tensor,))
        if noted is None or not noted[0]:
            return None
        symbol = symbol_name(number)
        self.symbols[symbol], self.present[symbol] = noted
        return noted[1]

    def note(self, ops: Sequence[Op], args: Sequence[Any]) -> tuple[str, Any] | None:
        """The name of a reading and its value; without a name if it is the same at each step.

        Numbers that move among the arguments have to stay what they are.
        """
        tracer = self.tracer
        ops = [tuple(map(_settled, op)) for op in ops]
        args = [_settled(item) for item in args]
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        nodes = [traced_node(item, tracer) or self._outside(item) for item in tensors]
        known = [node for node in nodes if node is not None]
        if not self.allowed or len(known) < len(nodes) or any(item.is_complex() for item in tensors):
            return None
        part = self._part_of(known, tracer)
        if part is None:
            return None
        placed = iter(known)
        stored = tuple(next(placed) if isinstance(item, torch.Tensor) else item for item in args)
        with outside_of_modes(), torch.no_grad():
            results = _applied(
                ops, [part.values[item] if isinstance(item, fx.Node) else item for item in stored]
            )
        value = results[-1]
        if not part.may_change:
            return "", value
        last = last_node(tracer.graph)
        name = f"read_{len(self.found)}"
        self.found[name] = Reading(
            name, tuple(ops), stored, part, last, user_place(), tuple(map(describe, results))
        )
        return name, value

    def whole(self, tensor: Any) -> Any:
        """A tensor with all its values, on the condition that they stay; UNKNOWN if they are not known."""
        tracer = self.tracer
        node = traced_node(tensor, tracer)
        part = None if node is None or not self.allowed else self._part_of([node], tracer)
        if part is None or node is None:
            return UNKNOWN
        value: torch.Tensor = part.values[node].detach().clone()
        if part.may_change:
            noted = "has all the elements that it had"
            kind = _WHOLE_NUMBERS[value.element_size()]
            ops: list[Op] = [(_aten.equal.default, value)]
            if value.is_floating_point():  # a NaN is no other, and zeros have signs
                dense = value.contiguous().view(kind)
                ops = [(_aten.contiguous.default,), (_aten.view.dtype, kind), (_aten.equal.default, dense)]
            self.ask(ops, (tensor,), noted)
        return value

    @property
    def inputs_read(self) -> set[int]:
        """The ids of the inputs that the values are computed from."""
        return self.program.inputs_read

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Answer nothing: what is traced inside is no part of this trace."""
        before, self.allowed = self.allowed, False
        try:
            yield
        finally:
            self.allowed = before

    def spelled(self, text: str) -> str:
        """A text of torch with values in the place of the names of symbols."""
        return _SYMBOL.sub(lambda found: str(self.present.get(found[0], found[0])), text)

    # --- nodes of the trace ------------------------------------------------------------------------------------------

    def _part_of(self, nodes: Sequence[fx.Node], tracer: Any) -> RecordedPart | None:
        """What leads to nodes; None if their values are not known."""
        given = self._known()
        made = part_that_makes(nodes, given, self._is_fine)
        if made is None:
            return None
        needed = with_draws_before(made, tracer.graph, draws)
        apart = set(needed) - set(made)
        if not all(map(can_be_repeated, filter(draws, needed))) or (
            self.inputs.with_values and any(map(draws, needed))
        ):
            return None
        roles = {given.items_by_node[node].role for node in needed if node in given.items_by_node}
        if Role.PARAM in roles and Role.USER in roles:
            return None  # the model's own results
        held = [given[node] for node in needed if node in given]
        if _share_memory(held) and any(root in given for root in written_roots(needed)):
            return None
        with nothing_drawn(needed):
            values = evaluated(needed, tracer.root, given, apart)
        return RecordedPart(made, needed, values, bool(held) or any(map(draws, needed)))

    def _outside(self, tensor: torch.Tensor) -> fx.Node | None:
        """A node for a tensor from outside of build(), which has none before the first op on it."""
        node: fx.Node | None = self.tracer.create_arg(tensor) if id(tensor) in self.inputs.free else None
        return node

    def _is_fine(self, node: fx.Node) -> bool:
        return is_constant(node, self.tracer.root) or node.target in OPERATIONS or draws(node)

    def _known(self) -> _Known:
        """The nodes of inputs that are known before the step."""
        if self._given is None or self._given.tracer is not self.tracer:
            self._given = _Known(self.tracer, self.inputs, self.leaves)
        return self._given

    def close(self) -> None:
        """Keep the ops that lead to what was asked for, as long as the trace is whole: torch changes it in the end."""
        self.program.fill(list(self.found.values()), self.tracer, self._known())

    def about(self, name: str) -> str:
        """What is read, for people."""
        where = self.found[name].where
        return f"{READ} at {where}" if where.file else READ


def _settled(item: Any) -> Any:
    """A number as it is now, on the condition that it stays so."""
    return item.node.pytype(item) if is_moving(item) else item


class _Known(Mapping[fx.Node, Any]):
    """The nodes of inputs that are known before the step, with their values. A trace asks about few of many."""

    def __init__(self, tracer: Any, inputs: Inputs, leaves: Sequence[Any]) -> None:
        self.tracer, self._inputs, self._leaves = tracer, inputs, leaves
        self.items_by_node = dict(zip(placeholders(tracer.graph), inputs.items, strict=False))

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            held = getattr(self.tracer.root, str(node.target), None)
            free = self._inputs.free
            return (
                free[id(held)]
                if isinstance(held, torch.Tensor) and is_fake(held) and id(held) in free
                else UNKNOWN
            )
        item = self.items_by_node.get(node)
        value = UNKNOWN
        if item is None or item.role not in _BEFORE:
            return UNKNOWN
        if isinstance(item.source, Fixed):
            value = item.source.value
        elif isinstance(item.source, Argument):
            value = self._leaves[item.source.index]
        elif is_moving(item.fake):
            value = value_of(item.fake)
        has_data = not (isinstance(value, Spec) or (isinstance(value, torch.Tensor) and value.is_meta))
        return value if has_data else UNKNOWN

    def __getitem__(self, node: fx.Node) -> Any:
        if (value := self._value(node)) is UNKNOWN:
            raise KeyError(node)
        return value

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self._value(node) is not UNKNOWN

    def __iter__(self) -> Iterator[fx.Node]:
        nodes = (*self.items_by_node, *self.tracer.graph.find_nodes(op="get_attr"))
        return (node for node in nodes if node in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _share_memory(values: Sequence[Any]) -> bool:
    keys = [storage_key(value) for value in values if isinstance(value, torch.Tensor)]
    return len(set(keys)) < len(keys)


def _applied(ops: Sequence[Op], args: Sequence[Any]) -> list[Any]:
    """The results of ops one after the other."""
    results: list[Any] = []
    for op, *others in ops:
        args = (op(*args, *others),)
        results += args
    return results
