"""Writes through chains of views that functionalisation cannot turn round, made direct.

`as_strided`, `unfold` and `expand` in a chain of views are refused by torch where the chain is written through, or turned round
into other numbers. Eager mode writes to memory, and the layouts of a view and of the whole tensor are known: the view
is one `as_strided` of that tensor, which can be turned round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from monograph.compat.tensors import may_overlap
from monograph.ir.memory import base_of, written_by
from monograph.ir.meta import origin, set_origin
from monograph.layout import fills_a_block

_AS_STRIDED = torch.ops.aten.as_strided.default
_HARD = (_AS_STRIDED, torch.ops.aten.unfold.default)


def write_directly(module: fx.GraphModule) -> None:
    """Let ops in place of a recorded step write through one view where they wrote through a chain."""
    chains = _Chains()
    for node in list(module.graph.nodes):
        if node.op != "call_function" or torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            continue
        for written in written_by(node):
            chain = chains.of(written)
            if (
                chain.is_hard
                and (chain.num_views > 1 or written.target is not _AS_STRIDED)
                and _is_whole(chain.root)
            ):
                view = written.meta["val"]
                with module.graph.inserting_before(node):
                    place = (tuple(view.shape), view.stride(), view.storage_offset())
                    direct = module.graph.call_function(_AS_STRIDED, (chain.root, *place))
                direct.meta["val"] = view
                set_origin(direct, origin(node))
                node.replace_input_with(written, direct)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The views between a value and the tensor whose memory it shows: how many, and whether one of them is hard."""

    root: fx.Node
    num_views: int = 0
    is_hard: bool = False


class _Chains:
    """The chains of a graph. What was asked of stays true while only later nodes get other inputs."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, _Chain] = {}

    def of(self, node: fx.Node) -> _Chain:
        """The chain that ends with a value; that of each value on the way is found once."""
        path = []
        while (chain := self._known.get(node)) is None:
            if (source := base_of(node)) is None:
                chain = self._known[node] = _Chain(node)
                break
            path.append(node)
            node = source
        for item in reversed(path):
            if not written_by(item):
                chain = _Chain(chain.root, chain.num_views + 1, chain.is_hard or _is_hard(item))
            self._known[item] = chain
        return chain


def _is_hard(node: fx.Node) -> bool:
    view = node.meta.get("val")
    return node.target in _HARD or (
        isinstance(view, torch.Tensor) and may_overlap(tuple(view.shape), view.stride())
    )


def _is_whole(root: fx.Node) -> bool:
    """True for a tensor that fills a block of memory, from its beginning on."""
    whole = root.meta.get("val")
    if not isinstance(whole, torch.Tensor) or whole.storage_offset() != 0:
        return False
    return whole.numel() == 0 or fills_a_block(whole.shape, whole.stride())
