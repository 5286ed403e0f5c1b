"""What is looked at before an op of a file runs, so that it stays in its memory whatever the file gives it.

An op that loads without trust stands in one of two lists. The kernels of `SAFE_OPS` look at all that they are given.
Those of `RULES` believe some of it: their rule refuses forms that do not fit, when the file is read, and names the
tensors whose values are looked at before each call. `tests/stress/artifact_ops.py` tries all of them.
"""

from __future__ import annotations

import operator
from typing import Any, Final

from torch import fx

from monograph.artifact.bounds.given import Given, all_arguments
from monograph.artifact.bounds.rules import RULES
from monograph.artifact.bounds.safe_ops import OF_UNSURE_FORM, SAFE_OPS, SIZE_UNKNOWN
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import check
from monograph.compat.ops import OpOverload, packet_name, schema_arguments
from monograph.ir.meta import ScalarMeta, TensorMeta, set_origin, set_value, value
from monograph.ir.own_ops import FORMED, WITHIN
from monograph.ir.program import Program
from monograph.user_code.lines import Origin

_COUNTS: Final = ("int", "SymInt", "bool")


def is_bounded(op: Any) -> bool:
    """True if it is known why an op stays in its memory."""
    return packet_name(op) in SAFE_OPS or packet_name(op) in RULES


def bounded(
    graph: fx.Graph, name: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Origin
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a call of an op, after checks of their values. `Damaged` for forms that do not fit."""
    arguments = schema_arguments(op)
    fits = len(args) <= len(arguments) and set(kwargs) <= {item.name for item in arguments}
    check(fits, f"{name} has arguments that it cannot have")
    positions = {item.name: position for position, item in enumerate(arguments)}
    given = all_arguments(op, args, kwargs)
    for item in arguments:
        if any(kind in item.kind for kind in _COUNTS):
            check(
                not _has_number(given[item.name]), f"{name} takes its {item.name} from a number of the step"
            )
    rule = RULES.get(packet_name(op))
    if rule is None:
        return args, kwargs
    changed, named = list(args), dict(kwargs)
    value_of: Any = value
    described = {key: fx.node.map_arg(item, value_of) for key, item in given.items()}
    try:
        limits = list(rule(Given(name, described, given)) or ())
    except (LookupError, TypeError, ValueError, AttributeError):  # of arguments that are not of their kinds
        raise Damaged(f"{name} has arguments that do not fit") from None
    for limit in limits:
        node = given[limit.argument]
        looked = graph.create_node(
            "call_function",
            WITHIN,
            (node, limit.low, limit.high, limit.ascending, limit.besides, f"{limit.argument} of {name}"),
            {},
            f"looked_{name}_{limit.argument}",
        )
        set_value(looked, value(node))
        set_origin(looked, place)
        if limit.argument in named:
            named[limit.argument] = looked
        else:
            changed[positions[limit.argument]] = looked
    return tuple(changed), named


def formed(graph: fx.Graph, node: fx.Node, place: Origin) -> fx.Node:
    """The result of an op, after a check of its form where the file's word for it might not be true.

    What torch infers without data is what kernels give, but of some ops only for arguments that make sense.
    """
    source = node.args[0] if node.target is operator.getitem else node
    described = value(node)
    if not isinstance(described, TensorMeta) or not isinstance(source, fx.Node):
        return node
    if not isinstance(source.target, OpOverload) or packet_name(source.target) not in OF_UNSURE_FORM:
        return node
    if source is not node and (packet_name(source.target), node.args[1]) in SIZE_UNKNOWN:
        return node
    looked = graph.create_node(
        "call_function", FORMED, (node, list(described.shape), described.dtype), {}, f"formed_{node.name}"
    )
    set_value(looked, described)
    set_origin(looked, place)
    return looked


def without_forms(program: Program) -> Program:
    """The program for compilers, which allocate what they infer."""
    changed = program.rebuilt()
    for node in list(changed.graph.nodes):
        if node.target is FORMED:
            node.replace_all_uses_with(node.args[0])
            changed.graph.erase_node(node)
    return changed


def _has_number(item: Any) -> bool:
    """True if a number that is computed while the step runs is in an argument."""
    found: list[fx.Node] = []
    fx.node.map_arg(item, found.append)
    return any(isinstance(value(node), ScalarMeta) for node in found)
