"""Before a build and its steps: modules are made ready, processes that take steps together agree, and an error names who is at fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from torch import nn

from monograph.capture.lazy import initialise_lazy
from monograph.capture.process.signals import handlers_heard, handlers_held_back
from monograph.capture.step.request import Request
from monograph.compat.distributed.groups import group_named, whole_group
from monograph.compiler import Build
from monograph.distributed.buffers import begin_alike
from monograph.distributed.replicas import Replica, replicas_of
from monograph.distributed.whole_parameters import check_sharded
from monograph.distributed.zero import shard_parameters, shard_state
from monograph.errors import NonfiniteError
from monograph.ir.meta import form

if TYPE_CHECKING:
    from monograph.distributed.agreement import Agreement, Signature

T = TypeVar("T")


class Together:
    """What the processes of a graph have agreed on. Nothing is imported or asked in a step of one process."""

    def __init__(self) -> None:
        self.alike = WeakSet[nn.Module]()  # modules with which all have begun alike
        self._agreements: dict[str, Agreement] = {}  # by group
        self._signatures: dict[int, Signature] = {}  # by number of the build

    def begin(self, request: Request) -> None:
        """Let modules without a wrapper begin with the state of the first process.

        Raises DistributedError if a process has other parameters, buffers or optimizers.
        """
        owned = request.owned
        replicas = replicas_of(owned, owned.named_modules(), request.settings)
        new = [item for item in replicas if item.size > 1 and item.module not in self.alike]
        if new:
            lines = [line for item in new for line in _described(item)]
            lines += [
                f"optimizer {type(item.optimizer).__name__} of {len(item.parameters)} tensors"
                for item in owned.optimizers
            ]
            groups = {item.group for item in new}
            self._agreed_on(request.name, groups).ranks.agree(
                "\n".join(lines), "to begin with the same state"
            )
        begin_alike(replicas, self.alike)

    def run(self, name: str, build: Build, steps: int, step: Callable[[], T]) -> T:
        """Run a step of a build. Raises DistributedError in every process if one is gone, late, or takes another step."""
        signature = self._signature_of(build)
        groups = dict.fromkeys(item.group for item in signature.collectives)
        with self._agreed_on(name, groups).step(steps, build.number, signature):
            try:
                return step()
            except NonfiniteError as error:  # all have it: the flag is that of all
                nonfinite = error
        raise nonfinite

    def meet(self, name: str, builds: Sequence[Build], what: str) -> None:
        """All are about to look at a step. Raises DistributedError in those that do so while others do not."""
        sending = [build for build in builds if build.communicates]
        if sending:
            signature = self._signature_of(sending[-1])
            groups = dict.fromkeys(item.group for item in signature.collectives)
            self._agreed_on(name, groups).meet(what)

    def meet_eagerly(self, name: str, request: Request) -> None:
        """All are about to run a step in eager mode, if that sends anything."""
        owned = request.owned
        groups = {
            item.group
            for item in replicas_of(owned, owned.named_modules(), request.settings)
            if item.size > 1
        }
        if groups and owned.optimizers:
            self._agreed_on(name, groups).meet("eager")

    def _signature_of(self, build: Build) -> Signature:
        if build.number not in self._signatures:
            self._signatures[build.number] = _agreement().signature_of(
                (op for part in build.plan.program.programs for op in part.ops()), tensor_of=form
            )
        return self._signatures[build.number]

    def _agreed_on(self, name: str, groups: Collection[str]) -> Agreement:
        of = next(iter(groups)) if len(groups) == 1 else ""
        if of not in self._agreements:
            found = _agreement()
            self._agreements[of] = found.Agreement(
                found.Ranks(f"{name}/{of}", group_named(of) if of else whole_group())
            )
        return self._agreements[of]


def prepare(request: Request, together: Together) -> None:
    """Make the modules of a request ready."""
    with handlers_heard(), handlers_held_back():
        initialise_lazy(request)
    check_sharded(request.owned.named_modules())
    together.begin(request)
    shard_parameters(request.owned, request.settings)
    shard_state(request.owned, request.settings)


def _agreement() -> Any:
    return importlib.import_module("monograph.distributed.agreement")


def _described(replica: Replica) -> Iterator[str]:
    for path, tensor in (*replica.module.named_parameters(), *replica.module.named_buffers()):
        yield f"{replica.path}.{path}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
