"""The update of one parameter as a formula: what a trace has recorded for it, to be recorded for another one as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.arithmetic import OPERATIONS
from monograph.capture.numbers.copies import repeat_number
from monograph.capture.numbers.moving import Moving, is_moving
from monograph.compat.distributed.ops import communicates
from monograph.compat.fakes import example_of, shown_example
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.ops import has_effect, is_profiler_mark, is_random
from monograph.compat.symbolic_numbers import another_unknown, is_symbolic, place_number
from monograph.compat.traces.nodes import last_node, let_stand_for, new_node, traced_node
from monograph.ir.memory import views_its_input, written_by

Part = Mapping[str, Any]  # by name the fakes that an update is about: the parameter, its gradient, its state
PARAMETER = "parameter"
_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Formula:
    """The nodes of a trace that update one parameter."""

    part: Part
    before: Mapping[fx.Node, str]  # what its tensors were when it began
    after: Mapping[str, fx.Node]  # what those are now that it has written
    nodes: Sequence[fx.Node]

    @property
    def fits_other_sizes(self) -> bool:
        """True if all that it computes has the strides of the parameter."""
        strides = self.part[PARAMETER].stride()
        values = (node.meta["val"] for node in self.nodes)
        return all(is_symbolic(value) or value.dim() == 0 or value.stride() == strides for value in values)

    @property
    def is_pointwise(self) -> bool:
        """True if each of its ops does the same to every element, and to tensors of any form."""
        return all(
            is_symbolic(node.meta["val"]) or torch.Tag.pointwise in getattr(node.target, "tags", ())
            for node in self.nodes
        )

    def repeat(self, part: Part, tracer: Any, record: Callable[[fx.Node, fx.Node], None]) -> None:
        """Record the same for another parameter; `record(node, like)` gets each new node."""
        new: dict[fx.Node, Any] = {
            node: traced_node(part[name], tracer) for node, name in self.before.items()
        }
        examples = _Examples(self.part[PARAMETER], part[PARAMETER])

        def of(item: fx.Node) -> Any:
            return new.get(item, item)

        for node, kind in self._kinds:
            args = fx.map_arg(node.args, of)
            kwargs = fx.map_arg(node.kwargs, of) if node.kwargs else {}
            new[node] = made = new_node(node.graph, node.target, args, kwargs)
            record(made, node)
            value = node.meta["val"]
            if kind is _Kind.MOVING:
                repeat_number(value, made, tracer)
            elif kind is _Kind.NUMBER:
                place_number(another_unknown(value), made, tracer)
            elif kind is _Kind.WRITE:
                made.meta["val"] = shown_example(written_by(made)[0].meta["val"])
            else:
                made.meta["val"] = examples.like(value)
        for name, node in self.after.items():
            let_stand_for(new[node], part[name], tracer)
            torch.autograd.graph.increment_version(part[name])
            if self.part[name].real_tensor is not None:  # the fake carries its value
                part[name].real_tensor.copy_(self.part[name].real_tensor)

    @cached_property
    def _kinds(self) -> Sequence[tuple[fx.Node, _Kind]]:
        return [(node, _kind(node)) for node in self.nodes]

    def same_as(self, other: Formula) -> bool:
        """True if another parameter is updated by the same ops on the same numbers; only sizes may differ."""
        return self._lines() == other._lines()

    def _lines(self) -> list[Any]:
        names: dict[fx.Node, Any] = dict(self.before)
        lines: list[Any] = []
        for at, node in enumerate(self.nodes):
            args = fx.map_arg((node.args, node.kwargs), lambda item: names.get(item, item.name))
            lines.append((node.target, repr(args), self._form(node.meta["val"])))
            names[node] = at
        return [*lines, {name: names[node] for name, node in self.after.items()}]

    def _form(self, value: Any) -> Any:
        if is_symbolic(value):
            return value.node.pytype, is_moving(value) and value.node.target
        return value.dtype, value.device, bool(value.dim())


class _Kind(Enum):
    """What the node of a formula makes."""

    MOVING = auto()  # a number of ours
    NUMBER = auto()  # one of torch's, without a value
    WRITE = auto()
    VALUE = auto()


def _kind(node: fx.Node) -> _Kind:
    value = node.meta["val"]
    if is_symbolic(value):
        return _Kind.MOVING if is_moving(value) else _Kind.NUMBER
    return _Kind.WRITE if written_by(node) else _Kind.VALUE


class _Examples:
    """Fakes for what a formula makes of another parameter. What has one form is one fake: nobody writes to them."""

    def __init__(self, parameter: Any, other: Any) -> None:
        self._is_exact = parameter.shape == other.shape
        self._shape, self._strides = other.shape, other.stride()
        self._made: dict[Any, Any] = {}

    def like(self, value: Any) -> Any:
        """A fake for what has been `value` for the first parameter."""
        if self._is_exact or value.dim() == 0:
            return shown_example(value)
        form = value.dtype, value.device
        if form not in self._made:
            self._made[form] = example_of(value, self._shape, self._strides)
        return self._made[form]


def recorded(part: Part, run: Callable[[], object], tracer: Any, moving: Moving) -> Formula | None:
    """Trace an update by `run`. Gives its formula; None if one of a parameter that looks alike may be another one."""
    decided, asked = len(moving.branches.texts), len(moving.mode.shape_env.guards)
    before = {name: traced_node(tensor, tracer) for name, tensor in part.items()}
    last = last_node(tracer.graph)
    run()
    with outside_of_modes(), outside_of_function_modes():
        kept = _own_nodes(part, before, list(_since(last)))
        now = {name: traced_node(tensor, tracer) for name, tensor in part.items()}
    if kept is None or len(moving.mode.shape_env.guards) != asked:
        return None
    numbers = {node.meta["val"].node.name for node in kept if is_moving(node.meta["val"])}
    if any(numbers & set(names) for names in list(moving.branches.texts.values())[decided:]):
        return None  # Python has decided something on them
    after = {name: node for name, node in now.items() if node is not None and node is not before[name]}
    if not set(kept).issuperset(after.values()):
        return None
    return Formula(part, {node: name for name, node in before.items() if node is not None}, after, kept)


def _since(last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def _own_nodes(
    part: Part, before: Mapping[str, fx.Node | None], nodes: Sequence[fx.Node]
) -> list[fx.Node] | None:
    """Those of the nodes that depend on the tensors of a part; None if there are some that are not understood."""
    own = {node for node in before.values() if node is not None}
    if len(own) < len(part):
        return None
    kept: list[fx.Node] = []
    for node in nodes:
        is_arithmetic = node.target in OPERATIONS
        if is_profiler_mark(node.target) or not (node.users or written_by(node)):
            if is_arithmetic and OPERATIONS[node.target].raises:
                return None  # that it does not raise will be a condition
        elif not (is_arithmetic and own.isdisjoint(node.all_input_nodes)):  # else it is the same for all
            if not _is_understood(node, own, part[PARAMETER]):
                return None
            own.add(node)
            kept.append(node)
    return kept


def _is_understood(node: fx.Node, own: set[fx.Node], parameter: Any) -> bool:
    """True for arithmetic, and for ops on tensors that have the form of the parameter, or no dimension."""
    value: Any = node.meta.get("val")
    target = node.target
    if node.op != "call_function":
        return False
    if is_symbolic(value):
        is_read = target is _READ and not isinstance(value, torch.SymBool)
        return not own.isdisjoint(node.all_input_nodes) and (
            is_read or (is_moving(value) and target in OPERATIONS)
        )
    if type(value) is not type(parameter) or has_effect(target) or is_random(target) or views_its_input(node):
        return False
    if communicates(target):
        return False
    written = written_by(node)
    if (
        len(written) > 1
        or not own.issuperset(written)
        or value.is_conj()
        or value.is_neg()
        or value.is_complex()
    ):
        return False
    return bool(value.dim() == 0 or value.shape == parameter.shape)
