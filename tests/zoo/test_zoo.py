"""Models of other people's libraries: each trains as one graph with the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support import Side, assert_same, train_eagerly
from tests.support.swaps import STEPS_BEFORE, swaps_soon, wait_for_compiler
from tests.zoo import (
    diffusers_models,
    graph_models,
    plain_models,
    transformers_decoders,
    transformers_encoders,
    transformers_vision,
)
from tests.zoo.model import Batch, ZooModel

__all__ = ["swaps_soon"]  # a fixture
STEPS = 3
MODELS = [
    *transformers_decoders.MODELS,
    *transformers_encoders.MODELS,
    *transformers_vision.MODELS,
    *diffusers_models.MODELS,
    *graph_models.MODELS,
    *plain_models.MODELS,
]


class ZooSide(Side):
    """A side whose state includes buffers that state_dict() leaves out."""

    def state(self) -> dict[str, Any]:
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return super().state() | {"buffers": buffers}


class TrainStep(mg.Graph):
    """The step as a user writes it."""

    def __init__(self, model: ZooModel, side: Side) -> None:
        super().__init__()
        self.model, self.loss, self.clip = side.model, model.loss, model.training.clip
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

    def build(self, *batch):
        loss = self.loss(self.model, *batch)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


def make_side(model: ZooModel) -> Side:
    torch.manual_seed(0)
    module = model.make().train()
    optimizer = model.training.optimizer(module.parameters())
    schedule = model.training.schedule
    return ZooSide(module, optimizer, schedule(optimizer) if schedule is not None else None)


def make_batches(model: ZooModel, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [model.batch(generator) for _ in range(steps)]


def expected_of(model: ZooModel, steps: int) -> list[dict[str, Any]]:
    """What plain PyTorch leaves after each step."""

    def clip(module: torch.nn.Module) -> None:
        if model.training.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), model.training.clip)

    side = make_side(model)
    torch.manual_seed(1)
    return train_eagerly(side, model.loss, make_batches(model, steps), before_update=clip)


def check(
    model: ZooModel, tell: Callable[[str, object], None], steps: int = STEPS, *, swaps: bool = False
) -> None:
    """Train both sides on the same fresh batches; everything is the same after each step."""
    expected = expected_of(model, steps)
    assert expected[0]["loss"].isfinite()
    moved = [not torch.equal(p, expected[-1]["model"][name]) for name, p in expected[0]["model"].items()]
    assert sum(moved) > len(moved) / 2, "the model does not train"
    side = make_side(model)
    step = TrainStep(model, side)
    torch.manual_seed(1)
    for index, batch in enumerate(make_batches(model, steps)):
        loss = step(*batch)
        tell("nodes", len(step.builds[0].program.graph.nodes))
        tell("builds", len(step.builds))
        assert_same(expected[index], {"loss": loss, **side.state()}, f"step {index}")
        if swaps:
            assert index or step.backend == "aten"
            wait_for_compiler(step)
    assert not swaps or step.backend == "exact"
    assert len(step.builds) == model.builds, step.explain()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_trains_with_the_bits_of_eager(
    model: ZooModel, record_property: Callable[[str, object], None]
) -> None:
    told: dict[str, object] = {"model": model.name, "library": model.library, "result": "bitwise"}
    try:
        if model.deviation is None:
            check(model, told.__setitem__)
        elif model.deviation.kind == "refused":
            told["result"] = f"refused: {model.deviation.cause}"
            with pytest.raises(mg.CaptureError, match=model.deviation.match):
                check(model, told.__setitem__)
        else:
            told["result"] = f"other bits: {model.deviation.cause}"
            with pytest.raises(AssertionError, match=model.deviation.match):
                check(model, told.__setitem__)
    finally:
        for name, value in told.items():
            record_property(name, value)


SOME = [model for model in MODELS if model.deviation is None and model.builds == 1]


@pytest.mark.usefixtures("swaps_soon")
@pytest.mark.parametrize("model", SOME[:: len(SOME) // 10][:10], ids=str)
def test_trains_with_the_bits_of_eager_through_the_swap(model: ZooModel) -> None:
    check(model, lambda _name, _item: None, STEPS_BEFORE + 2, swaps=True)


def test_most_of_the_zoo_is_bitwise() -> None:
    assert len(MODELS) >= 40
    assert len({str(model) for model in MODELS}) == len(MODELS)
    assert sum(model.deviation is not None for model in MODELS) <= 0.05 * len(MODELS)
