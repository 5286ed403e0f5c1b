"""What is done before a build is made: lazy modules get their shapes, copies in several processes begin alike."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from monograph.capture.lazy import initialise_lazy
from monograph.capture.process.signals import handlers_heard, handlers_held_back
from monograph.capture.step.request import Request
from monograph.distributed.buffers import begin_alike
from monograph.distributed.replicas import replicas_of
from monograph.distributed.whole_parameters import check_sharded
from monograph.distributed.zero import shard_parameters, shard_state


class Alike(WeakSet[nn.Module]):
    """The modules with which all processes have begun alike."""


def prepare(request: Request, alike: Alike) -> None:
    """Make the modules of a request ready; those that begin alike now are noted."""
    with handlers_heard(), handlers_held_back():
        initialise_lazy(request)
    owned, modules = request.owned, request.owned.named_modules()
    check_sharded(modules)
    begin_alike(replicas_of(owned, modules, request.settings), alike)
    shard_parameters(owned, request.settings)
    shard_state(owned, request.settings)
