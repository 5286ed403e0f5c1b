"""The programs of all ranks of a pipeline, without processes: what one sends another one receives, and there is no state of others."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.distributed.pipelining import SCHEDULES
from monograph.distributed.pipeline.rank import of_rank
from monograph.distributed.pipeline.spread import Spread
from monograph.distributed.pipeline.stages import Pipeline
from monograph.ir.meta import computes, form
from monograph.ir.ops.transfers import RECEIVE, SEND
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.layout import contiguous_stride
from monograph.plan.check import check_plan
from monograph.plan.plan import make_plan
from tests.distributed.staged import Extras, Tied, loss_of, place, tied

MICRO_BATCHES, DEPTH = 8, 8


class Step(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.backend("aten")

    def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = self.model(x)
        loss = loss_of(self.model, output, y, torch.ones(1), Extras())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return loss, output


@pytest.fixture(scope="module")
def step() -> Step:
    step = Step(Tied(DEPTH))
    step.compile(mg.spec((MICRO_BATCHES, 3), torch.int64), mg.spec((MICRO_BATCHES, 3), torch.int64))
    return step


def spread(step: Step, schedule: str, ranks: int, stages: int) -> Spread:
    """The step over so many stages, with several layers in each."""
    layers = {f"model.layers.{index}": index * stages // DEPTH for index in range(DEPTH)}
    table = {"model.embedding": 0, **layers, "model.norm": stages - 1}
    pipeline = Pipeline(table, ranks, MICRO_BATCHES, schedule, "monograph/world")
    return Spread(step.builds[0].stages[0].program, pipeline, ("x", "y"))


def transfers(programs: list[Program], *, sent: bool) -> dict[tuple[int, int], list[tuple[object, ...]]]:
    """What goes from one rank to another, in order."""
    found = defaultdict(list)
    for rank, program in enumerate(programs):
        for node in filter(computes, program.graph.nodes):
            if sent and node.target is SEND:
                given, to = node.args[:2]
                described = form(given)  # type: ignore[arg-type]
                assert described is not None
                assert described.stride == contiguous_stride(described.shape)
                found[rank, to].append((tuple(described.shape), described.dtype))
            if not sent and node.target is RECEIVE:
                shape, dtype, _, source = node.args[:4]
                found[source, rank].append((tuple(shape), dtype))  # type: ignore[arg-type]
    return dict(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_one_rank_sends_another_receives(step: Step, schedule: str) -> None:
    stages = 4 if schedule in ("GPipe", "1F1B") else 8
    over = spread(step, schedule, 4, stages)
    programs = [of_rank(over, rank) for rank in range(4)]
    sent = transfers(programs, sent=True)
    assert sent == transfers(programs, sent=False)
    lends = any(abs(one - other) == 3 for one, other in sent)
    assert lends is (over.last_rank == 3)  # the weight of the embedding is lent to the rank of the head
    for program in programs:
        verify(program, after="the cut")
        check_plan(make_plan(program))
    updated = Counter(port.path for program in programs for _, port in program.updates())
    assert updated == Counter(port.path for _, port in over.program.updates())  # each by one rank
    for program in programs:
        assert {port.path for _, port in program.updates()} <= {port.path for port in program.inputs}


def test_skipped_values_ride_through_neighbours(step: Step) -> None:
    over = spread(step, "1F1B", 4, 4)
    hidden = (1, 3, 6)
    forward = [[form(item).shape for item in over.micro.sent_forward(stage)] for stage in range(4)]  # type: ignore[union-attr]
    assert forward == [
        [hidden, hidden],
        [hidden, hidden],
        [hidden, hidden],
        [],
    ]  # the embedded words, and what was made of them
    backward = [len(over.micro.sent_backward(stage)) for stage in range(4)]
    assert backward == [0, 3, 3, 3]  # their gradients, and that of the weight of the head


def test_stages_change_nothing_in_one_process(step: Step) -> None:
    other = Step(Tied(DEPTH))
    place(other.model, tied(2).stages)
    other.config.set_pipeline_schedule("GPipe")
    other.compile(mg.spec((MICRO_BATCHES, 3), torch.int64), mg.spec((MICRO_BATCHES, 3), torch.int64))
    assert other.builds[0].program.digest == step.builds[0].program.digest
    block = other.model.layers[0].to(mg.GraphModule)
    assert block.stage_id == 0
    assert "stages=[model.embedding=0, " in repr(other.config)
    block.set_stage(None)
    assert block.stage_id is None


def test_words_are_checked() -> None:
    step = Step(Tied(1))
    with pytest.raises(mg.MonographError, match="a stage is a whole number from 0 on"):
        step.model.norm.to(mg.GraphModule).set_stage(-1)
    with pytest.raises(mg.MonographError, match="1F2B") as found:
        step.config.set_pipeline_schedule("1F2B")
    assert "InterleavedZeroBubble" in found.value.hint
    assert step.config.settings.pipeline_schedule == "1F1B"
