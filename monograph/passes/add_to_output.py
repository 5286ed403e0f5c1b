"""Matrix products add to what is there already."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.ir.meta import compute_nodes, form, origin, set_origin, set_value, value
from monograph.ir.program import Program
from monograph.layout import Layout

aten = torch.ops.aten
_ADDING: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def add_to_output(program: Program) -> Program:
    """`add(mm(a, b), c)` becomes `addmm(c, a, b)`: sums of gradients need no tensor for each summand.

    The sum is rounded once less, or in another order, than eager mode does it.
    """
    if not any(_match(node) for node in compute_nodes(program.graph)):
        return program
    fused = program.rebuilt()
    for node in list(compute_nodes(fused.graph)):
        if (found := _match(node)) is not None:
            _fuse(node, *found)
    return fused


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """For a sum the product in it, perhaps after a view, and what is added to it."""
    if node.target is not aten.add.Tensor or node.kwargs or not _is_plain(node):
        return None
    for product, other in (node.args[::-1], node.args):
        if (
            isinstance(product, fx.Node)
            and isinstance(other, fx.Node)
            and product is not other
            and form(product) == form(other) == form(node)
            and _is_read_once(_product(product))
            and _is_read_once(product)
        ):
            return product, other
    return None


def _product(node: fx.Node) -> fx.Node | None:
    """The matrix product that a node is, or is a plain view of."""
    source = node.args[0] if node.target is aten.view.default else node
    return source if isinstance(source, fx.Node) and source.target in _ADDING and _is_plain(source) else None


def _is_read_once(node: fx.Node | None) -> bool:
    return node is not None and len(node.users) == 1


def _is_plain(node: fx.Node) -> bool:
    """True for floating-point tensors without gaps in the order of their dimensions."""
    described = form(node)
    return (
        described is not None
        and described.dtype.is_floating_point
        and described.layout == Layout.contiguous(*described.shape)
    )


def _fuse(node: fx.Node, shown: fx.Node, other: fx.Node) -> None:
    """Write a sum as a product that adds, where the sum stands."""
    product = _product(shown)
    assert product is not None
    with node.graph.inserting_before(node):
        addend = other if product is shown else _view(other, like=product)
        fused = node.graph.call_function(_ADDING[product.target], (addend, *product.args), {})
        _describe(fused, like=product)
        result = _view(fused, like=node) if product is not shown else fused
    set_origin(result, origin(node))
    node.replace_all_uses_with(result)
    for dead in dict.fromkeys((node, shown, product)):
        node.graph.erase_node(dead)
    if addend is not other and not other.users:
        other.graph.erase_node(other)  # a view of the addend that nothing else reads


def _view(node: fx.Node, *, like: fx.Node) -> fx.Node:
    """A tensor in the shape of another one: what it is a view of, if that has the shape, or a new view."""
    described = form(like)
    assert described is not None
    source: Any = node.args[0] if node.target is aten.view.default else None
    if isinstance(source, fx.Node) and form(source) == described:
        return source
    view = node.graph.call_function(aten.view.default, (node, list(described.shape)))
    _describe(view, like=like)
    return view


def _describe(node: fx.Node, *, like: fx.Node) -> None:
    set_value(node, value(like))
    set_origin(node, origin(like))
