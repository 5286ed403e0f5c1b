"""Arithmetic on numbers that are known already."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.ir.meta import ScalarMeta, compute_nodes, output_nodes, value
from monograph.ir.program import Program
from monograph.passes.effects import is_pure

aten = torch.ops.aten
_NUMBERS = (bool, int, float)


def fold_constants(program: Program) -> Program:
    """Compute what depends on Python numbers alone: `1.0 - 0.9` becomes the number it gives at each step."""
    returned = set(output_nodes(program.graph))
    known: dict[fx.Node, Any] = {}
    for node in compute_nodes(program.graph):
        if isinstance(value(node), ScalarMeta) and node not in returned and is_pure(node):
            number = _number(node, known)
            if number is not None:
                known[node] = number
    return program.rebuilt(instead=known) if known else program


def _number(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The number that a node gives, None if that is not known."""
    if node.target is aten._local_scalar_dense.default:
        return _filled_with(node.args[0])
    arguments = [known.get(item, item) if isinstance(item, fx.Node) else item for item in node.args]
    if node.kwargs or not all(type(item) in _NUMBERS for item in arguments):
        return None
    try:
        number = node.target(*arguments)  # type: ignore[operator]
    except (ArithmeticError, ValueError):  # it fails at each step as it does in eager mode
        return None
    return number if type(number) in _NUMBERS else None


def _filled_with(tensor: Any) -> Any:
    """The value of a 0-dimensional tensor that is made from a number, as its dtype holds it."""
    if not isinstance(tensor, fx.Node) or tensor.target not in (
        aten.full.default,
        aten.scalar_tensor.default,
    ):
        return None
    number, dtype = tensor.args[-1], tensor.kwargs.get("dtype")
    if dtype is None or type(number) not in _NUMBERS or list(tensor.args[:-1]) not in ([], [[]]):
        return None
    try:
        return torch.full((), number, dtype=dtype, device="cpu").item()  # type: ignore[arg-type]
    except RuntimeError:  # it does not fit the dtype
        return None
