"""What is done before a build is made: lazy modules get their shapes, copies in several processes begin alike."""

from __future__ import annotations

from monograph.capture.lazy import initialise_lazy
from monograph.capture.process.signals import handlers_heard, handlers_held_back
from monograph.capture.step.request import Request
from monograph.distributed.whole_parameters import check_sharded
from monograph.distributed.zero import shard_parameters, shard_state
from monograph.internals.together import Together


def prepare(request: Request, together: Together) -> None:
    """Make the modules of a request ready."""
    with handlers_heard(), handlers_held_back():
        initialise_lazy(request)
    check_sharded(request.owned.named_modules())
    together.begin(request)
    shard_parameters(request.owned, request.settings)
    shard_state(request.owned, request.settings)
