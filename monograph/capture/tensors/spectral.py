"""Singular values and eigenvalues without vectors, as eager mode computes them where no gradient flows.

torch asks for the vectors as well when it sees a tensor subclass, and a trace works on such tensors: another routine of
LAPACK, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final

import torch

from monograph.compat.modes import current_tracer
from monograph.ir.call.tree import flatten

FUNCTIONS: Final = frozenset(
    {
        torch.linalg.svdvals,
        torch.linalg.eigvalsh,
        torch.linalg.cond,
        torch.linalg.norm,
        torch.linalg.matrix_norm,
        torch.linalg.matrix_rank,
        torch.norm,
        torch.Tensor.norm,
        torch.nuclear_norm,
    }
)
# the argument that asks for vectors, yes by default and thus not recorded; and which results are vectors
_VECTORS: Final[Mapping[Any, tuple[str, tuple[int, ...]]]] = {
    torch.ops.aten._linalg_svd.default: ("compute_uv", (0, 2)),
    torch.ops.aten._linalg_eigh.default: ("compute_v", (1,)),
}


def values_only(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of FUNCTIONS; what it records asks for vectors only if a gradient needs them."""
    leaves: list[Any] = []
    flatten((args, kwargs), leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    graph = current_tracer().graph
    last = next(iter(reversed(graph.nodes)), None)
    result = func(*args, **kwargs)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        for node in takewhile(lambda node: node is not last, reversed(graph.nodes)):
            if node.target in _VECTORS:
                argument, vectors = _VECTORS[node.target]
                if not any(user.users for user in node.users if user.args[1] in vectors):
                    node.kwargs = {**node.kwargs, argument: False}
    return result
