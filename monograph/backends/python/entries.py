"""The quickest way from Python into ops: torch's own functions, where they call these very ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from monograph.compat.modes import calls_seen, outside_of_modes
from monograph.compat.ops import OpOverload, direct_call, is_custom, python_functions
from monograph.ir.evaluate import example
from monograph.ir.meta import TensorMeta, frozen, value
from monograph.plan.updates.counterparts import NumberTensors

Entry = Callable[..., Any]
_KNOWN: dict[Any, bool] = {}  # by function and kind of call whether it is the op
_CALLS = 10_000  # that are remembered; a step has fewer than a hundred kinds


class Invocation(NamedTuple):
    """A call of an op; nodes stand for values."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def entries(calls: Iterable[Invocation]) -> dict[Any, Entry]:
    """For the op of each call what calls it, in all the ways in which these do."""
    by_op: dict[Any, dict[Any, Invocation]] = {}
    for call in calls:
        if isinstance(call.target, OpOverload):
            by_op.setdefault(call.target, {})[_kind(call.args), _kind(call.kwargs)] = call
    if any(map(is_custom, by_op)):  # their code may ask for modes, which torch's functions must not
        return {op: direct_call(op) for op in by_op}
    return {op: _entry(op, kinds) for op, kinds in by_op.items()}


def _entry(op: Any, kinds: dict[Any, Invocation]) -> Entry:
    for function in python_functions(op):
        if all(_is_op(function, kind, call) for kind, call in kinds.items()):
            return function
    return direct_call(op)


def _kind(item: Any) -> Any:
    """What torch's functions choose an op by: the types of the arguments."""
    if isinstance(item, dict):
        return frozen({name: _typed(entry) for name, entry in item.items()}, _of_node) if item else ()
    return frozen([_typed(entry) for entry in item], _of_node)


def _typed(item: Any) -> Any:
    """An argument, which may be numbers as tensors; none of those is inside of another."""
    if isinstance(item, NumberTensors):
        return ["tensor"] * len(item.numbers) if isinstance(item.numbers, list) else "tensor"
    return item


def _of_node(node: fx.Node) -> Any:
    described = value(node)
    return "tensor" if isinstance(described, TensorMeta) else described


def _is_op(function: Entry, kind: Any, call: Invocation) -> bool:
    """True if a function calls the op of a call like this, with the same arguments, and no other."""
    key = (function, call.target, kind)
    if key not in _KNOWN:
        if len(_KNOWN) >= _CALLS:
            _KNOWN.clear()
        wanted = _calls_by(call.target, call)
        _KNOWN[key] = wanted is not None and _calls_by(function, call) == wanted
    return _KNOWN[key]


def _calls_by(function: Entry, call: Invocation) -> Any:
    """The ops that a function runs, with their arguments; None if it does not take such arguments without data."""
    given: list[torch.Tensor] = []

    def made(described: TensorMeta) -> torch.Tensor:
        given.append(torch.zeros(()) if not described.shape else described.empty("meta"))
        return given[-1]

    def example_of(item: Any) -> Any:
        if isinstance(item, NumberTensors):
            count = len(item.numbers) if isinstance(item.numbers, list) else None
            return torch.ones(()) if count is None else [torch.ones(()) for _ in range(count)]
        if isinstance(item, torch.device):
            return torch.device("meta")  # nothing is to be allocated
        return example(value(item), made) if isinstance(item, fx.Node) else item

    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), example_of)
    places = {id(tensor): index for index, tensor in enumerate(given)}
    try:
        with outside_of_modes(), torch.no_grad(), calls_seen() as seen:
            function(*args, **kwargs)
    except Exception:  # no kernel without data, or another function of that name: it is not taken
        return None
    return [(op, _spelled(arguments, places)) for op, arguments in seen] or None


def _spelled(item: Any, places: dict[int, int]) -> Any:
    if isinstance(item, torch.Tensor):
        return "tensor", places.get(id(item)), item.dtype, tuple(item.shape)
    if isinstance(item, (list, tuple)):
        return [_spelled(entry, places) for entry in item]
    if isinstance(item, dict):
        return [(name, _spelled(entry, places)) for name, entry in sorted(item.items())]
    return type(item).__name__, repr(item)
