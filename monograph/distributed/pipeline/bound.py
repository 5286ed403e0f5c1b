"""A captured step over several ranks becomes the step of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from monograph.capture.accumulation.batches import batch_paths
from monograph.capture.tensors.conditions import Conditions
from monograph.compat.distributed.groups import (
    import_fake_collectives,
    num_processes,
    own_rank,
    shared_name,
    whole_group,
)
from monograph.distributed.pipeline.rank import of_rank
from monograph.distributed.pipeline.spread import STATE, Spread
from monograph.distributed.pipeline.stages import Pipeline, check_stages
from monograph.errors import DistributedError
from monograph.ir.call.signature import Call
from monograph.ir.graph_signature import Source, Target, Write
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.text import shortened
from monograph.settings import Settings
from monograph.state.find import Owned


def pipeline_of(owned: Owned, modules: Mapping[str, nn.Module], settings: Settings) -> Pipeline | None:
    """How a step is spread over the processes; None in one process, and without stages.

    Raises DistributedError for stages that cannot be a pipeline.
    """
    if not settings.stages or num_processes() == 1:
        return None
    if not owned.optimizers:
        raise DistributedError(
            "a graph without an optimizer has stages, and there are several processes: only training is a pipeline",
            hint="let a graph without stages evaluate, once each process has loaded the state of all",
        )
    if settings.accumulation_steps == 1:
        raise DistributedError(
            "modules have stages, and there are no micro-batches: a pipeline takes several in one step",
            hint="config.set_gradient_accumulation_steps(8), or no set_stage()",
        )
    if settings.data_parallel is not None or settings.zero is not None:
        raise DistributedError(
            "modules have stages, and enable_data_parallel() or enable_zero() is on: a pipeline is over all processes",
            hint="use one of the two",
        )
    import_fake_collectives()
    group = shared_name(whole_group())
    found = Pipeline(
        dict(settings.stages), num_processes(), settings.accumulation_steps, settings.pipeline_schedule, group
    )
    check_stages(found, modules)
    return found


@dataclass(frozen=True)
class OfRank:
    """What a process runs of a step: its program, and where the inputs and outputs of that are among those of the whole."""

    program: Program
    agreed: str = ""  # what all ranks have in common
    inputs: tuple[int, ...] | None = None  # None if it is the whole step
    outputs: tuple[int, ...] = ()
    state: frozenset[int] = frozenset()  # the inputs of the whole that are state
    elsewhere: frozenset[str] = frozenset()  # the parameters and buffers that other ranks update

    def sources(self, found: Iterable[Source]) -> tuple[Source, ...]:
        """Those of its inputs."""
        whole = tuple(found)
        return whole if self.inputs is None else tuple(whole[index] for index in self.inputs)

    def targets(self, found: tuple[Target, ...]) -> tuple[Target, ...]:
        """Those of its outputs; results of the call, which come first, have none."""
        if self.inputs is None:
            return found
        results = sum(port.role is Role.USER for port in self.program.outputs)
        return tuple(found[index - results] for index in self.outputs[results:])

    def conditions(self, found: Conditions) -> Conditions:
        """Those that look at its inputs. Each rank looks at its own: the others look at theirs."""
        if self.inputs is None:
            return found
        try:
            return found.over(self.inputs, self.state)
        except LookupError as error:
            raise DistributedError(
                f"the step branches on state of several stages of the pipeline: {shortened(error.args[0])}",
                hint="use an optimizer that looks at each parameter by itself: foreach=False",
            ) from error

    def check_writes(self, writes: Sequence[Write]) -> None:
        """Raise DistributedError for numbers that a step of a pipeline changes in Python objects."""
        if self.inputs is not None and (moving := next((item for item in writes if item.moves), None)):
            raise DistributedError(
                f"a step of a pipeline changes a number in a Python object: {moving.about}",
                hint="keep it in a tensor, or change it after the call",
            )


def of_this_rank(program: Program, pipeline: Pipeline | None, call: Call) -> OfRank:
    """What this process runs of a step; the whole of it without a pipeline. Raises DistributedError for a step that cannot be cut."""
    if pipeline is None:
        return OfRank(program)
    spread = Spread(program, pipeline, batch_paths(call))
    own = of_rank(spread, own_rank())
    kept = {port.path for port in own.inputs}
    inputs = {port.path: index for index, port in enumerate(program.inputs)}
    outputs = {(port.role, port.path): index for index, port in enumerate(program.outputs)}
    return OfRank(
        own,
        f"{pipeline.text}, of the micro-batch {spread.micro.placing.digest[:16]}",
        tuple(inputs[port.path] for port in own.inputs),
        tuple(outputs[port.role, port.path] for port in own.outputs),
        frozenset(index for index, port in enumerate(program.inputs) if port.role in STATE),
        frozenset(
            port.path
            for port in program.inputs
            if port.role in (Role.PARAM, Role.BUFFER) and port.path not in kept
        ),
    )
