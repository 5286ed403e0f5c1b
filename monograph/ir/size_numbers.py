"""The whole numbers of a program that are computed from sizes of tensors, and nothing else."""

from __future__ import annotations

import operator

import torch
from torch import fx

from monograph.ir.meta import ScalarMeta, value

aten = torch.ops.aten
_READ = (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)
_COMPUTED = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    torch.sym_max,
    torch.sym_min,
)


def numbers_of_sizes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Those that compilers keep as numbers: the shapes of what they compute are made of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        described = value(node) if node.op == "call_function" else None
        if not isinstance(described, ScalarMeta) or described.kind != "int":
            continue
        is_computed = node.target in _COMPUTED and all(
            item in found if isinstance(item, fx.Node) else type(item) is int for item in node.args
        )
        if node.target in _READ or is_computed:
            found.add(node)
    return frozenset(found)
