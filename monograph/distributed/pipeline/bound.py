"""A captured step over several ranks becomes the step of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from monograph.capture.accumulation.batches import batch_paths
from monograph.capture.accumulation.first_buffers import TakenOver
from monograph.capture.tensors.conditions import Conditions
from monograph.compat.distributed.groups import (
    group_size,
    import_fake_collectives,
    num_processes,
    rank_in,
    ranks_in,
    shared_name,
    whole_group,
)
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.distributed.wrappers import is_data_parallel
from monograph.distributed.columns import EXAMPLE, STAGES_DIM, group_of_stages, has_stages
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
    mesh = None if settings.data_parallel is None else settings.data_parallel.mesh
    if not settings.stages and has_stages(mesh):
        raise DistributedError(
            f"the mesh of enable_data_parallel() has a dimension {STAGES_DIM!r}, and no module has a stage",
            hint="set the stage of each module: block.to(mg.GraphModule).set_stage(0)",
        )
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
    if (settings.data_parallel or settings.zero) and not has_stages(mesh):
        raise DistributedError(
            "modules have stages, and enable_data_parallel() or enable_zero() is on: nobody has said which processes are the stages "
            "of one copy of the model",
            hint=f"pass a mesh with a dimension of that name: config.{EXAMPLE}",
        )
    if settings.zero is not None and settings.zero.stage == 3:
        raise DistributedError(
            "modules have stages, and enable_zero(stage=3) is on: each process has the whole parameters of its stages",
            hint="enable_zero(stage=2)",
        )
    _check_whole(modules)
    import_fake_collectives()
    group = shared_name(whole_group() if mesh is None else group_of_stages(mesh))
    if (size := group_size(group)) == 1:
        return None
    placed = tuple(sorted(set(_placed(settings, ranks_in(group)))))
    found = Pipeline(
        dict(settings.stages), size, settings.accumulation_steps, settings.pipeline_schedule, group, placed
    )
    check_stages(found, modules)
    return found


def _placed(settings: Settings, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The stages that are placed, each with the number of its process among `ranks`, those of this copy of the pipeline."""
    stages = dict(settings.stages)
    for path, placement in settings.placements:
        here = [rank for rank in placement if rank in ranks]
        if len(here) != 1:
            raise DistributedError(
                f"module {path} of stage {stages[path]} is placed on the ranks {list(placement)}, of which {here or 'none'} "
                f"is in the pipeline of the ranks {list(ranks)}: a stage runs on one process",
                hint="place it on one rank of each copy of the pipeline, or leave the placement out",
            )
        yield stages[path], ranks.index(here[0])


def _check_whole(modules: Mapping[str, nn.Module]) -> None:
    """Raise DistributedError for modules that processes share out among themselves in another way besides."""
    for path, module in modules.items():
        if is_data_parallel(module):
            raise DistributedError(
                f"modules have stages, and DistributedDataParallel wraps {path}: its copies are on all processes",
                hint=f"leave it unwrapped, and call config.{EXAMPLE}",
            )
        if any(map(is_sharded, module.parameters(recurse=False))):
            raise DistributedError(
                f"modules have stages, and {path} has parameters that are DTensors",
                hint="give a pipeline plain modules; config.enable_zero(stage=2) spreads the state of optimizers",
            )


@dataclass(frozen=True)
class Shares:
    """How a step is shared out among the ranks of a pipeline; of any other step nothing."""

    agreed: str = ""  # what all ranks have in common
    owners: Mapping[str, int] = field(default_factory=dict)  # the rank that has a state for all, by path
    elsewhere: frozenset[str] = frozenset()  # the parameters and buffers that other ranks update
    state_elsewhere: frozenset[str] = frozenset()  # and what belongs to these
    draws: str = ""  # why one process cannot draw the random numbers of all ranks as they do


@dataclass(frozen=True)
class OfRank:
    """What a process runs of a step: its program, and where the inputs and outputs of that are among those of the whole."""

    program: Program
    shares: Shares = Shares()
    notes: tuple[str, ...] = ()
    inputs: tuple[int, ...] | None = None  # None if it is the whole step
    outputs: tuple[int, ...] = ()
    state: frozenset[int] = frozenset()  # the inputs of the whole that are state

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


def of_this_rank(
    program: Program, pipeline: Pipeline | None, call: Call, taken_over: Sequence[TakenOver] = ()
) -> OfRank:
    """What this process runs of a step; the whole of it without a pipeline. Raises DistributedError for a step that cannot be cut.

    Buffers are `taken_over` from another copy of the model before.
    """
    if pipeline is None:
        return OfRank(program)
    spread = Spread(program, pipeline, batch_paths(call), taken_over)
    rank = rank_in(pipeline.group)
    own = of_rank(spread, rank)
    kept = {port.path for port in own.inputs}
    inputs = {port.path: index for index, port in enumerate(program.inputs)}
    outputs = {(port.role, port.path): index for index, port in enumerate(program.outputs)}
    owners = {port.path: owner for port in program.inputs if (owner := spread.owner_of(port)) is not None}
    of_modules = {port.path for port in program.inputs if port.role in (Role.PARAM, Role.BUFFER)}
    kept_for = {port.path for port in program.inputs if port.role in STATE} - of_modules
    return OfRank(
        own,
        Shares(
            spread.text,
            owners,
            frozenset(of_modules - kept),
            frozenset(path for path in kept_for if owners.get(path, rank) != rank),
            spread.mixed_draws,
        ),
        tuple(_about_draws(spread)),
        tuple(inputs[port.path] for port in own.inputs),
        tuple(outputs[port.role, port.path] for port in own.outputs),
        frozenset(index for index, port in enumerate(program.inputs) if port.role in STATE),
    )


def _about_draws(spread: Spread) -> Iterator[str]:
    """What to say of random numbers that several stages draw."""
    if len(spread.drawing) > 1:
        yield (
            f"stages {', '.join(map(str, sorted(spread.drawing)))} of the pipeline draw random numbers, each rank from its own generator: "
            "seed them apart, as with torch.manual_seed(seed + rank), or stages draw the same numbers; one process draws others"
        )
