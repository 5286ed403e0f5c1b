"""The ops that a step dispatches, by the names that they have in its program."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from monograph.ir.meta import compute_nodes
from monograph.ir.program import Program


class Seen(TorchDispatchMode):
    """Counts the ops that run: one in place as the op that it stands for, one on lists for each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.num_in_place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.num_in_place += func._schema.is_mutable
        single = name.removeprefix("_foreach_")
        self.ops[single.removesuffix("_")] += len(args[0]) if single != name else 1
        return func(*args, **(kwargs or {}))


def ops_of(program: Program) -> Counter[str]:
    """The ops of torch in a program."""
    return Counter(
        node.target.overloadpacket.__name__  # type: ignore[union-attr]
        for node in compute_nodes(program.graph)
        if hasattr(node.target, "overloadpacket")
    )
