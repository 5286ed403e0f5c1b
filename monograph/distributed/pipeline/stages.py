"""Which stage of a pipeline a module belongs to, and how a step is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from monograph.compat.distributed.pipelining import Orders, orders
from monograph.errors import DistributedError


@dataclass(frozen=True)
class Pipeline:
    """A step over stages: that of each module by path, the ranks, the micro-batches, and the name of torch's schedule.

    `placed` has the rank of stages that are not to be where the schedule would have them. `group` is the name of the process group in programs. Nothing here asks for one.
    """

    stages: Mapping[str, int]
    num_ranks: int
    micro_batches: int
    schedule: str
    group: str
    placed: tuple[tuple[int, int], ...] = ()

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return max(self.stages.values()) + 1

    @cached_property
    def orders(self) -> Orders:
        """What each rank does, in order. Raises DistributedError for numbers that the schedule cannot take."""
        try:
            found = orders(self.schedule, self.num_ranks, self.num_stages, self.micro_batches)
        except ValueError as error:
            raise DistributedError(
                f"no pipeline of {self.num_stages} stages on {self.num_ranks} ranks with {self.micro_batches} micro-batches: "
                f"{error}",
                hint="set_stage(), config.set_gradient_accumulation_steps() and config.set_pipeline_schedule() have to fit "
                "the number of processes",
            ) from error
        return self._as_placed(found) if self.placed else found

    def _as_placed(self, found: Orders) -> Orders:
        """The same orders for other ranks."""
        taken: dict[int, int] = {}  # by number in the schedule the rank
        for stage, rank in self.placed:
            number = found.ranks[stage]
            if taken.setdefault(number, rank) != rank:
                first = found.ranks.index(number)
                two = f"stages {first} and {stage} are" if first != stage else f"modules of stage {stage} are"
                raise DistributedError(
                    f"{two} placed on two processes, and {self.schedule} runs them on one",
                    hint="give them one placement, or none",
                )
            if list(taken.values()).count(rank) > 1:
                other = next(
                    index
                    for index, slot in enumerate(found.ranks)
                    if slot != number and taken.get(slot) == rank
                )
                raise DistributedError(
                    f"stage {stage} is placed on the process of stage {other}, and {self.schedule} runs them on two",
                    hint=f"give stage {stage} a placement of its own, or none",
                )
        rest = iter([rank for rank in range(self.num_ranks) if rank not in taken.values()])
        ranks = [taken[number] if number in taken else next(rest) for number in range(self.num_ranks)]
        return Orders(
            tuple(found.actions[ranks.index(rank)] for rank in range(self.num_ranks)),
            tuple(ranks[number] for number in found.ranks),
        )

    def stage_of(self, module: str) -> int | None:
        """The stage of a module, which is its own or that of the nearest module around it; None if there is none."""
        while module:
            if (found := self.stages.get(module)) is not None:
                return found
            module = module.rpartition(".")[0]
        return None

    @property
    def text(self) -> str:
        """All of it in a line, the same on all ranks."""
        stages = ", ".join(f"{path}: {stage}" for path, stage in sorted(self.stages.items()))
        placed = "".join(f", stage {stage} on rank {rank}" for stage, rank in self.placed)
        return f"{self.schedule} of {self.micro_batches} micro-batches over {self.num_ranks} ranks, stages {{{stages}}}{placed}"


def check_stages(pipeline: Pipeline, modules: Mapping[str, nn.Module]) -> None:
    """Raise DistributedError for a stage without a module, and for a module with parameters that is in no stage."""
    present = set(pipeline.stages.values())
    if missing := [str(stage) for stage in range(pipeline.num_stages) if stage not in present]:
        raise DistributedError(
            f"no module is in stage {missing[0]}, and there is a stage {pipeline.num_stages - 1}",
            hint="number the stages from 0 on, without gaps",
        )
    if lost := next(_without_stage(pipeline, modules), ""):
        raise DistributedError(
            f"module {lost} has parameters and no stage, and others have one",
            hint=f"set the stage of {lost} or of a module around it: block.to(mg.GraphModule).set_stage(0)",
        )
    _ = pipeline.orders


def _without_stage(pipeline: Pipeline, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for path, module in modules.items():
        if next(module.parameters(recurse=False), None) is not None and pipeline.stage_of(path) is None:
            yield path
