"""The groups of collectives that build() calls itself, by the names that all processes have for them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import fx

from monograph.compat.distributed.groups import num_processes, shared_name
from monograph.compat.distributed.ops import communicates, waits
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.ops import named_arguments, schema_arguments
from monograph.distributed.replicas import Replica
from monograph.errors import CaptureError
from monograph.ir.meta import origin
from monograph.state.find import Owned

_GROUP = "group_name"


def about_lonely(
    graph: fx.Graph, owned: Owned, replicas: Sequence[Replica], ran: Container[str]
) -> list[str]:
    """What to say of a training step that is one of several, and shares nothing with them. `ran` has the paths of wrappers."""
    trained = [parameter for item in owned.optimizers for parameter in item.parameters]
    idle = [item for item in replicas if item.wrapper is not None and item.size > 1 and item.path not in ran]
    shares = len(idle) < len(replicas) or any(map(is_sharded, trained))
    if (
        shares
        or not trained
        or num_processes() == 1
        or any(communicates(node.target) for node in graph.nodes)
    ):
        return []
    known = {*map(id, trained)}
    past = [item.path for item in idle if not known.isdisjoint(map(id, item.module.parameters()))]
    to_do = (
        f"build() runs what {past[0]} wraps, and not {past[0]} itself; only that averages gradients"
        if past
        else "wrap the model with DistributedDataParallel, or call config.enable_data_parallel()"
    )
    return [f"there are {num_processes()} processes, and each trains by itself: {to_do}"]


def share_names(graph: fx.Graph) -> None:
    """Let each collective of a recorded graph name its group so that texts and digests are the same in all processes."""
    for node in graph.nodes:
        if not communicates(node.target) or waits(node.target):
            continue
        names = [argument.name for argument in schema_arguments(node.target)]
        if _GROUP not in names:
            raise CaptureError(
                f"build() calls {node.target} of torch.distributed, which works in place beside the step",
                where=origin(node),
                hint="call it after the step, on what build() returns",
            )
        group = named_arguments(node.target, node.args, node.kwargs)[_GROUP]
        place = names.index(_GROUP)
        if place < len(node.args):
            node.update_arg(place, shared_name(group))
        else:
            node.update_kwarg(_GROUP, shared_name(group))
