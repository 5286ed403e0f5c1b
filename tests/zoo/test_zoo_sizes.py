"""Models of other people's libraries at five sizes each: the bits of plain PyTorch, and no builds but for its own branches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support import assert_same
from tests.zoo.sized_models import MODELS, SizedModel
from tests.zoo.test_zoo import TrainStep, make_side


@pytest.mark.parametrize("sized", MODELS, ids=str)
def test_builds_at_five_sizes(sized: SizedModel, record_property: Callable[[str, object], None]) -> None:
    plain, traced = make_side(sized.model), make_side(sized.model)
    step = TrainStep(sized.model, traced)
    step.config.backend("aten")
    first, second = (torch.Generator().manual_seed(7) for _ in range(2))
    for seed, size in enumerate(sized.sizes):
        torch.manual_seed(seed)
        plain.optimizer.zero_grad()
        expected = sized.model.loss(plain.model, *sized.batch(first, *size))
        expected.backward()
        plain.optimizer.step()
        torch.manual_seed(seed)
        loss = step(*sized.batch(second, *size))
        assert_same(expected.detach(), loss.detach(), f"loss at {size}")
        assert_same(plain.state(), traced.state(), f"state after {size}")
    record_property("sized", sized.columns(len(step.builds)))
    assert len(step.builds) == sized.builds, [str(build.reason) for build in step.builds]


def test_each_further_build_has_a_cause() -> None:
    assert len(MODELS) >= 20
    assert len({str(sized) for sized in MODELS}) == len(MODELS)
    for sized in MODELS:
        assert len(set(sized.sizes)) == 5
        assert (sized.builds > 2) == bool(sized.why), sized
    assert sum(sized.builds > 3 for sized in MODELS) <= len(MODELS) / 4
