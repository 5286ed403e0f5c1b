"""Writes through chains of views that functionalisation cannot turn round, made direct.

`as_strided`, `unfold` and `expand` in a chain of views are refused by torch where the chain is written through, or turned round
into other numbers. Eager mode writes to memory, and the layouts of a view and of the whole tensor are known: the view
is one `as_strided` of that tensor, which can be turned round.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from monograph.compat.tensors import may_overlap
from monograph.ir.memory import base_of, memory_root, written_by
from monograph.ir.meta import origin, set_origin
from monograph.layout import fills_a_block

_AS_STRIDED = torch.ops.aten.as_strided.default
_HARD = (_AS_STRIDED, torch.ops.aten.unfold.default)


def write_directly(module: fx.GraphModule) -> None:
    """Let ops in place of a recorded step write through one view where they wrote through a chain."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            continue
        for written in written_by(node):
            root, chain = memory_root(written), list(_chain(written))
            if (
                any(map(_is_hard, chain))
                and (len(chain) > 1 or written.target is not _AS_STRIDED)
                and _is_whole(root)
            ):
                view = written.meta["val"]
                with module.graph.inserting_before(node):
                    place = (tuple(view.shape), view.stride(), view.storage_offset())
                    direct = module.graph.call_function(_AS_STRIDED, (root, *place))
                direct.meta["val"] = view
                set_origin(direct, origin(node))
                node.replace_input_with(written, direct)


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The views between a value and the tensor whose memory it shows."""
    while (source := base_of(node)) is not None:
        if not written_by(node):
            yield node
        node = source


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
