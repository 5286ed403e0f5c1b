"""Products in place on half types, whose kernels round a number to the type first, as those of their pure forms do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten
_BY_TENSORS: Final[Mapping[Any, Any]] = {
    aten.mul_.Scalar: aten.mul_.Tensor,
    aten._foreach_mul_.Scalar: aten._foreach_mul_.List,
    aten._foreach_mul_.ScalarList: aten._foreach_mul_.List,
}
_HALF: Final = (torch.float16, torch.bfloat16)


def round_numbers(graph: fx.Graph) -> None:
    """Give such ops their numbers as tensors of the type: then both kernels take the same numbers."""
    for target, by_tensors in _BY_TENSORS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            tensors, numbers = node.args
            several = isinstance(tensors, (list, tuple))
            examples = [item.meta["val"] for item in (tensors if several else [tensors])]
            if not any(item.dtype in _HALF and item.device.type == "cpu" for item in examples):
                continue
            given = numbers if isinstance(numbers, (list, tuple)) else [numbers] * len(examples)
            with graph.inserting_before(node):
                made = [
                    _as_tensor(graph, node, number, like)
                    for number, like in zip(given, examples, strict=True)
                ]
            node.target, node.args = by_tensors, (tensors, made if several else made[0])


def _as_tensor(graph: fx.Graph, node: fx.Node, number: Any, like: torch.Tensor) -> fx.Node:
    form: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    made = graph.call_function(aten.scalar_tensor.default, (number,), form)
    with torch.no_grad():
        made.meta = {**node.meta, "val": like.new_empty(())}
    return made
