"""What the collectives of a step move: bytes as a ring sends them, whatever the library really does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from monograph.compat.ops import named_arguments, packet_name
from monograph.distributed.programs.collectives import collectives_in_order
from monograph.errors import PlanError
from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import form, origin
from monograph.ir.program import Program

# how often each process sends nearly the whole: all but the part that is its own
_ROUNDS: Final = {
    "all_reduce": 2,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "broadcast": 1,
    "all_to_all_single": 1,
}
_GATHER: Final = "all_gather_into_tensor"
SENDS: Final = ("send", "isend")
_RECEIVES: Final = ("receive", "irecv")
_SEVERAL: Final = "batch_p2p_ops"


@dataclass(frozen=True)
class Transfer:
    """What one collective of a step moves between the `size` processes of its group.

    `whole_bytes` is what is summed, scattered or sent, or what is there when all is gathered.
    """

    op: str
    group: str
    size: int
    whole_bytes: int

    @property
    def payload_bytes(self) -> int:
        """What each process sends on average: (N-1)/N of the whole, twice for a sum; and all that is sent to one other."""
        if (rounds := _ROUNDS.get(self.op)) is None:
            return 0 if self.op in _RECEIVES else self.whole_bytes
        return -(-rounds * self.whole_bytes * (self.size - 1) // self.size)


def transfers_of(program: Program, size_of: Callable[[str], int]) -> Iterator[Transfer]:
    """The transfers of a step, in order. `size_of` has the number of processes of a group by its name."""
    return (transfer_of(node, size_of) for node in collectives_in_order(program))


def transfer_of(node: fx.Node, size_of: Callable[[str], int]) -> Transfer:
    """The transfer that an op begins. Raises PlanError for an op that is not known."""
    name = packet_name(node.target).partition("::")[2]
    alone = name.removesuffix("_coalesced")
    if alone not in _ROUNDS and name not in (*SENDS, *_RECEIVES, _SEVERAL):
        raise PlanError(
            f"{name}: nobody has said what that moves",
            where=origin(node),
            hint="use all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, isend or irecv",
        )
    arguments = named_arguments(node.target, node.args, node.kwargs)
    group = str(arguments["group_name"])
    size = size_of(group)
    given = _bytes_given(name, arguments)
    return Transfer(alone, group, size, given * size if alone == _GATHER else given)


def _bytes_given(name: str, arguments: dict[str, Any]) -> int:
    if name == _SEVERAL:
        pairs = zip(arguments["op_list"], arguments["tensors"], strict=True)
        return sum(_nbytes(tensor) for kind, tensor in pairs if kind in SENDS)
    tensors = (item for key, item in arguments.items() if key in ("input", "inputs", "tensor"))
    return sum(_nbytes(item) for item in leaves_in(list(tensors)))


def _nbytes(node: fx.Node) -> int:
    described = form(node)
    assert described is not None
    return described.nbytes
