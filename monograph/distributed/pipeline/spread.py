"""A step over micro-batches that is spread over ranks: which of them reads, makes and updates what."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Final

from torch import fx

from monograph.capture.accumulation.first_buffers import TakenOver
from monograph.distributed.pipeline.cut import MicroBatch
from monograph.distributed.pipeline.homes import is_scalar
from monograph.distributed.pipeline.stages import Pipeline
from monograph.distributed.pipeline.update import Update
from monograph.distributed.programs.collectives import collectives_in_order
from monograph.ir.meta import form, origin
from monograph.ir.ops.random import draws
from monograph.ir.port import GRADIENTS, Port, Role
from monograph.ir.program import Program

STATE: Final = (Role.PARAM, Role.BUFFER, Role.OPTIM, Role.EMA, Role.SCALER)


class Spread:
    """A step over micro-batches, cut for all ranks."""

    def __init__(
        self,
        program: Program,
        pipeline: Pipeline,
        split: Collection[str],
        taken_over: Sequence[TakenOver] = (),
    ) -> None:
        """`program` calls `accumulate` for each micro-batch and then `update`; `split` are the paths of its batches.

        Before that buffers are `taken_over` from the first copy of the model.
        """
        accumulate, update = program.parts
        self.taken_over = taken_over
        self.program, self.pipeline, self.split = program, pipeline, split
        self.micro = MicroBatch(accumulate, pipeline)
        self.ranks = pipeline.orders.ranks
        self._gradients = {
            port.path: self.ranks[self.micro.stage_of(item, port).stage]
            for item, port in self.micro.placing.outputs
            if port.role is Role.GRAD and isinstance(item, fx.Node)
        }
        self.update = Update(update, self.rank_of, pipeline.num_ranks)
        self._inputs = {port.path: port for port in program.inputs}
        self._early = {
            (port.role, port.path): (item, port)
            for item, port in self.micro.placing.outputs
            if isinstance(item, fx.Node)
        }

    @property
    def text(self) -> str:
        """What all ranks have in common, in lines: the pipeline, arguments, ops of a micro-batch, what is sent then, and results."""
        nodes = self.program.graph.find_nodes(op="placeholder")
        given = zip(nodes, self.program.inputs, strict=True)
        lines = [f"{node.target} {form(node)} {node.args[1:]}" for node in collectives_in_order(self.program)]
        lines += [f"{form(node)} of rank {self.update.homes.home[node]}" for node in self.update.sent]
        lines += [port.path for port in self.program.outputs if port.role is Role.USER]
        sent = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return "\n".join(
            [
                self.pipeline.text,
                *(
                    f"the argument {port.path}: {form(node)}"
                    for node, port in given
                    if port.role is Role.USER
                ),
                f"a micro-batch of the ops {self.micro.placing.digest[:16]}",
                f"results and an update that send {sent[:16]}",
            ]
        )

    @property
    def drawing(self) -> set[int]:
        """The stages that draw random numbers in a micro-batch."""
        return {place.stage for node, place in self.micro.place.items() if draws(node)}

    @property
    def mixed_draws(self) -> str:
        """Why one process that runs all stages cannot draw the numbers of each rank by where its modules are; empty if it can."""
        if any(port.role is Role.RNG for port in self.program.inputs):
            return "each rank moves its torch.Generator by the draws of its own stages alone"
        by_rank: dict[int, set[int]] = {}
        for node, place in self.micro.place.items():
            if not draws(node):
                continue
            if place.is_backward or self.pipeline.stage_of(origin(node).module) != place.stage:
                return f"{node.name} draws outside of the forward of a stage"
            by_rank.setdefault(self.ranks[place.stage], set()).add(place.stage)
        for rank, stages in by_rank.items():
            if len(stages) > 1:
                return f"rank {rank} draws in the stages {', '.join(map(str, sorted(stages)))}, in the order of its schedule"
        nodes = self.update.homes.split.graph.nodes
        late = next((node.name for node in nodes if draws(node)), "")
        return f"{late} draws in the update" if late else ""

    def rank_of(self, port: Port) -> int | None:
        """The rank that a gradient is summed on, or that updates state; None for what all ranks have."""
        if port.role is Role.GRAD:
            return self._gradients.get(port.path)
        if port.role in (Role.PARAM, Role.BUFFER):
            return self._owner(port.path)
        if port.role is Role.OPTIM:
            return self._owner(port.path.partition("/")[2].rpartition("/")[0])
        if port.role is Role.EMA:
            return self._owner(port.path.partition("/")[2].replace("/", ".", 1))
        return None

    def _owner(self, path: str) -> int | None:
        """The rank that a parameter or buffer belongs to: where its gradient is, where it changes, or where it is read first."""
        if (found := self._gradients.get(f"{GRADIENTS}{path}")) is not None:
            return found
        stage = self.micro.changed.get(path)
        if stage is None:
            stage = self._first_reader.get(path)
        if stage is None:
            stage = self.pipeline.stage_of(path.rpartition(".")[0])
        return None if stage is None else self.ranks[stage]

    @cached_property
    def _first_reader(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stage in range(self.pipeline.num_stages):
            for path in self.micro.read_by(stage):
                found.setdefault(path, stage)
        return found

    def owner_of(self, port: Port) -> int | None:
        """The rank to ask for a state: that updates it, or for a plain tensor of a module the first that reads it."""
        if port.role is not Role.CAPTURED:
            return self.rank_of(port) if port.role in STATE else None
        stage = self._first_reader.get(port.path)
        return None if stage is None else self.ranks[stage]

    # --- which rank has what -----------------------------------------------------------------------------------------

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """By rank the paths of the inputs that its micro-batches read."""
        return tuple(map(self._read_by, range(self.pipeline.num_ranks)))

    def _read_by(self, rank: int) -> frozenset[str]:
        return frozenset(
            path for stage in self.pipeline.orders.stages_of(rank) for path in self.micro.read_by(stage)
        )

    def maker(self, port: Port) -> int | None:
        """The rank that makes an output of the step; None if all do."""
        if (port.role, port.path) in self.update.late:
            return None if self.is_sent_to_all(port) else self.update.home(port)
        made = self._early.get((port.role, port.path))
        return None if made is None else self.ranks[self.micro.stage_of(*made).stage]

    def is_scalar(self, port: Port) -> bool:
        """True for an output of each micro-batch that is a tensor without dimensions."""
        made = self._early.get((port.role, port.path))
        return made is not None and is_scalar(made[0])

    def is_for(self, port: Port, rank: int) -> bool:
        """True for an output of the update that a rank makes: its own state, and what all ranks have."""
        home = self.update.home(port)
        if self.is_sent_to_all(port):
            return True
        if port.role is not Role.STATE:
            return home in (None, rank)
        if home is not None:
            return home == rank
        known = self._inputs.get(port.path)
        return known is None or self.rank_of(known) in (None, rank)

    def is_sent_to_all(self, port: Port) -> bool:
        """True for an output of the update that all ranks get."""
        return self.update.late.get((port.role, port.path)) in self.update.homes.sent

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self.ranks[-1]
