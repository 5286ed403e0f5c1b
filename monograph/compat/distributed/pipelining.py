"""The orders in which the ranks of a pipeline compute, send and receive: those of torch's schedules, and nothing else of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch

SCHEDULES: Final = (
    *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)
_AS_V: Final = ("ZBVZeroBubble", "DualPipeV")  # the last stage is on the first rank
_OF_ONE_STAGE: Final = ("GPipe", "1F1B")
# 1F1B by its own class begins the last rank at its second micro-batch; the interleaved one of one stage a rank does not
_CLASSES: Final = {"1F1B": "Interleaved1F1B"}
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
_KINDS: Final = frozenset(
    (
        *(FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT),
        *(SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD),
    )
)


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next: the kind, for a stage and a micro-batch."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Orders:
    """What each rank does, in order, and the rank of each stage."""

    actions: tuple[tuple[Action, ...], ...]
    ranks: tuple[int, ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, the first first."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


def orders(schedule: str, num_ranks: int, num_stages: int, micro_batches: int) -> Orders:
    """The orders of a schedule. Raises ValueError for numbers that it cannot take, in words.

    What: constructors of `torch.distributed.pipelining.schedules`, which write down the orders, and the function that puts sends
    and receives into one. Why: nothing public gives them. Degraded path: none, there is no pipeline without.
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    share, rest = divmod(num_stages, num_ranks)
    if rest or not share:
        raise ValueError(f"{num_stages} stages cannot be spread evenly over {num_ranks} ranks")
    if share > 1 and schedule in _OF_ONE_STAGE:
        raise ValueError(f"{schedule} takes one stage for each rank: {num_stages} stages, {num_ranks} ranks")
    mine = [0, num_stages - 1] if schedule in _AS_V else [index * num_ranks for index in range(share)]
    if schedule in _AS_V and share != 2:
        raise ValueError(f"{schedule} takes two stages for each rank: {num_stages} stages, {num_ranks} ranks")
    stages = [_stage(index, num_stages, num_ranks) for index in mine]
    kind = schedules.get_schedule_class(_CLASSES.get(schedule, schedule))
    try:
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        made = kind(stages[0] if single else stages, micro_batches, scale_grads=False)
        if single:
            found = _with_transfers(schedules, made, num_stages)
            ranks: Mapping[int, int] = {stage: stage for stage in range(num_stages)}
        else:
            found, ranks = made.pipeline_order_with_comms, made.stage_index_to_group_rank
    except AssertionError as error:
        raise ValueError(f"{schedule} has no order for {micro_batches} micro-batches: {error}") from error
    plain = tuple(tuple(_plain(found[rank])) for rank in range(num_ranks))
    return Orders(plain, tuple(ranks[stage] for stage in range(num_stages)))


def _stage(index: int, num_stages: int, num_ranks: int) -> Any:
    """What constructors read of a stage."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_rank=0,
        group_size=num_ranks,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=False,
        submod=torch.nn.Identity(),
        group=None,
        device="cpu",
    )


def _with_transfers(schedules: Any, made: Any, num_stages: int) -> Any:
    order = {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in made._get_pipeline_order().items()
    }
    return schedules._add_send_recv(order, stage_to_rank=_itself, num_stages=num_stages)


def _itself(stage: int) -> int:
    return stage


def _plain(actions: Sequence[Any]) -> Sequence[Action]:
    """Actions as ours: those that run together one after the other, those about sharded parameters not at all."""
    found = []
    for action in (inner for outer in actions for inner in (outer.sub_actions or (outer,))):
        if action.computation_type.value in _KINDS:
            found.append(Action(action.computation_type.value, action.stage_index, action.microbatch_index))
    return found
