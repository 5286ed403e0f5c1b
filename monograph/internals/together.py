"""Before a build and its steps: modules are made ready, processes that take steps together agree, and an error names who is at fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from torch import nn

from monograph.capture.lazy import initialise_lazy
from monograph.capture.optimizers.on_parts import try_on_parts
from monograph.capture.process.signals import handlers_heard, handlers_held_back
from monograph.capture.step.request import Request
from monograph.compat.distributed.groups import group_named, has_others, num_processes, whole_group
from monograph.compiler import Build
from monograph.distributed.buffers import begin_alike
from monograph.distributed.columns import mesh_text
from monograph.distributed.pipeline.bound import pipeline_of
from monograph.distributed.pipeline.stages import Pipeline
from monograph.distributed.replicas import Replica, replicas_of
from monograph.distributed.whole_parameters import check_sharded
from monograph.distributed.zero import shard_parameters, shard_state
from monograph.errors import NonfiniteError
from monograph.internals.sizes_of_one import NotPermitted, Served
from monograph.ir.meta import form
from monograph.settings import Settings
from monograph.state.find import Owned

if TYPE_CHECKING:
    from monograph.distributed.agreement import Agreement, Beginning, Signature

T = TypeVar("T")


class Together:
    """What the processes of a graph have agreed on. Nothing is imported or asked in a step of one process."""

    def __init__(self) -> None:
        self.alike = WeakSet[nn.Module]()  # modules with which all have begun alike
        self._beginning: Beginning | None = None  # of what takes more than one process
        self._agreements: dict[str, Agreement] = {}  # by group
        self._signatures: dict[int, Signature] = {}  # by number of the build

    def begin(self, request: Request) -> None:
        """Let modules without a wrapper begin with the state of the first process.

        Raises DistributedError if a process has other parameters, buffers or optimizers.
        """
        owned = request.owned
        modules = owned.named_modules()
        pipeline = pipeline_of(owned, modules, request.settings)
        replicas = replicas_of(owned, modules, request.settings)
        if pipeline is not None:
            self._begin_pipeline(request, pipeline, replicas)
            return
        new = [item for item in replicas if item.size > 1 and item.module not in self.alike]
        if new:
            lines = [line for item in new for line in _described(item)]
            lines += _optimizers(owned)
            groups = {item.group for item in new}
            self._agreed_on(request.name, groups).ranks.agree(
                "\n".join(lines), "to begin with the same state", self._beginning
            )
        begin_alike(replicas, self.alike)

    def _begin_pipeline(self, request: Request, pipeline: Pipeline, replicas: Sequence[Replica]) -> None:
        new = [module for module in request.owned.modules.values() if module not in self.alike]
        if new:
            copies = request.settings.data_parallel
            lines = [pipeline.text, *([] if copies is None else [mesh_text(copies.mesh)])]
            lines += [*_parameters(request.owned.modules), *_optimizers(request.owned)]
            ranks = self._agreed_on(request.name, ()).ranks
            ranks.agree("\n".join(lines), "to begin a pipeline", self._beginning)
            begin_alike(replicas, self.alike)
            self.alike.update(new)

    @contextmanager
    def building(self, name: str, kind: type) -> Iterator[None]:
        """Inside, there will be a build. If there is none, this is said to the others, which may wait with theirs."""
        if self._beginning is None and has_others():
            self._beginning = _agreement().Beginning(f"{kind.__module__}.{kind.__qualname__}/{name}")
        if self._beginning is not None:
            self._beginning.begins()
        try:
            yield
        except (Served, NotPermitted):
            raise
        except Exception as error:
            for agreement in self._agreements.values():
                agreement.not_built(error)
            if self._beginning is not None:
                self._beginning.not_built(error)
            raise

    def run(self, name: str, build: Build, steps: int, step: Callable[[], T]) -> T:
        """Run a step of a build. Raises DistributedError in every process if one is gone, late, or takes another step."""
        with self._agreement_of(name, build).step(steps, build.number, self._signature_of(build)):
            try:
                return step()
            except NonfiniteError as error:  # all have it: the flag is that of all
                nonfinite = error
        raise nonfinite

    def may_swap(self, name: str, build: Build, step: int, is_ready: bool) -> bool:
        """True from the step on at which all go over to compiled code, once it `is_ready` in each process.

        Their programs are the same but for those that have stages, or rows, of their own.
        """
        zero = build.settings.zero
        has_own = bool(build.captured.shares.agreed) or (zero is not None and zero.stage < 3)
        code = f"{self._signature_of(build).digest}/{build.number}" if has_own else build.program.digest
        return self._agreement_of(name, build).swaps(code, step, is_ready=is_ready)

    def meet(self, name: str, builds: Sequence[Build], what: str) -> None:
        """All are about to look at a step. Raises DistributedError in those that do so while others do not."""
        sending = [build for build in builds if build.communicates]
        if sending:
            self._agreement_of(name, sending[-1]).meet(what)

    def say(self, name: str, builds: Sequence[Build], word: str, what: str) -> dict[int, str]:
        """What each process that looks at a step has to say, by its number; this one alone if it sends nothing."""
        sending = [build for build in builds if build.communicates]
        return self._agreement_of(name, sending[-1]).say(word, what) if sending else {0: word}

    def meet_eagerly(self, name: str, request: Request) -> None:
        """All are about to run a step in eager mode, if that sends anything."""
        owned, settings = request.owned, request.settings
        modules = owned.named_modules()
        groups = {item.group for item in replicas_of(owned, modules, settings) if item.size > 1}
        if pipeline_of(owned, modules, settings) is not None:
            self._agreed_on(name, ()).meet("eager")
        elif groups and owned.optimizers:
            self._agreed_on(name, groups).meet("eager")

    def _signature_of(self, build: Build) -> Signature:
        if build.number not in self._signatures:
            # by the ranks of a pipeline, each of which has other collectives
            agreed = build.captured.shares.agreed
            programs = () if agreed else build.plan.program.programs
            self._signatures[build.number] = _agreement().signature_of(
                (op for part in programs for op in part.ops()), tensor_of=form, agreed=agreed
            )
        return self._signatures[build.number]

    def _agreement_of(self, name: str, build: Build) -> Agreement:
        groups = dict.fromkeys(item.group for item in self._signature_of(build).collectives)
        return self._agreed_on(name, groups)

    def _agreed_on(self, name: str, groups: Collection[str]) -> Agreement:
        of = next(iter(groups)) if len(groups) == 1 else ""
        if of not in self._agreements:
            found = _agreement()
            self._agreements[of] = found.Agreement(
                found.Ranks(f"{name}/{of}", group_named(of) if of else whole_group())
            )
        return self._agreements[of]


def sizes_vary(settings: Settings) -> bool:
    """True if sizes vary by themselves from the second one on; not in a pipeline, whose ranks send sizes that are numbers."""
    return settings.dynamic and not (settings.stages and num_processes() > 1)


def prepare(request: Request, together: Together) -> None:
    """Make the modules of a request ready."""
    with handlers_heard(), handlers_held_back():
        initialise_lazy(request)
    check_sharded(request.owned.named_modules())
    together.begin(request)
    try_on_parts(request.owned, request.settings)
    shard_parameters(request.owned, request.settings)
    shard_state(request.owned, request.settings)


def _agreement() -> Any:
    return importlib.import_module("monograph.distributed.agreement")


def _described(replica: Replica) -> Iterator[str]:
    return _parameters({replica.path: replica.module})


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for place, module in modules.items():
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{place}.{path}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _optimizers(owned: Owned) -> list[str]:
    return [
        f"optimizer {type(item.optimizer).__name__} of {len(item.parameters)} tensors"
        for item in owned.optimizers
    ]
