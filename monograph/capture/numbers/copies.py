"""Moving numbers once more: in another trace, and in the same one where ops are done again."""

from __future__ import annotations

from typing import Any

from torch import fx

from monograph.capture.numbers.moving import Node, is_moving, number_of
from monograph.compat.symbolic_numbers import place_number


def placed(number: Any, node: fx.Node, tracer: Any) -> Any:
    """The same number in another trace, which has it as `node`. What Python took it for was decided in the first one."""
    made = _copied(number) if is_moving(number) else number
    place_number(made, node, tracer)
    return made


def _copied(number: Any, name: str = "") -> Any:
    node: Node = number.node
    return number_of(node.copied(name or node.name))


def repeat_number(number: Any, node: fx.Node, tracer: Any) -> None:
    """Let `node`, which does with other numbers what has made `number`, make a number of its own with the same value.

    What Python decided on the way was decided for `number`, and is the same for this one.
    """
    like: Node = number.node
    moving = like.moving
    if like.target is None:  # read out of a tensor
        made = _copied(number, f"{like.name}_{len(moving.made)}")
        made.node.ordered = like.ordered
    else:
        operands = tuple(item.meta["val"] if isinstance(item, fx.Node) else item for item in node.args)
        value = like.value if like.is_known else None
        made = number_of(Node(moving, value, like.target, operands, kind=like.pytype))
        moving.note_recorded(made.node, node)
    moving.made[node] = made
    place_number(made, node, tracer)
