"""max_batch(): the largest batch that fits, proved by planning it and one above, with nothing changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.support.llama import SEVENTY_BILLION, Shape, Training


class Classifier(mg.Graph):
    """A step of two layers and an optimizer."""

    def __init__(self, device: str = "cpu", *, accumulate: int = 1) -> None:
        super().__init__()
        with torch.device(device):
            self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 10))
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.set_gradient_accumulation_steps(accumulate)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def forms(rows: Any, device: str = "cpu") -> tuple[Any, Any]:
    return mg.spec((rows, 16), device=device), mg.spec((rows,), torch.int64, device)


def held(rows: int, **options: Any) -> int:
    return Classifier(**options).memory(*forms(rows, options.get("device", "cpu"))).total_bytes


@pytest.mark.parametrize("memory", [100_000, 1_000_000, 1e9])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_answer_fits_and_one_more_does_not(memory: float, device: str) -> None:
    found = Classifier(device).max_batch(*forms(3, device), memory=memory)
    assert held(found, device=device) <= memory < held(found + 1, device=device)


def test_tensors_are_taken_as_their_forms() -> None:
    x, y = torch.randn(3, 16), torch.zeros(3, dtype=torch.int64)
    assert Classifier().max_batch(x, y, memory=10**6) == Classifier().max_batch(*forms(1), memory=10**6)


def test_micro_batches_are_whole() -> None:
    found = Classifier(accumulate=4).max_batch(*forms(4), memory=10**6)
    assert found % 4 == 0
    assert held(found, accumulate=4) <= 10**6 < held(found + 4, accumulate=4)
    assert found > Classifier().max_batch(*forms(4), memory=10**6)


def test_a_dim_is_the_size_that_is_looked_for() -> None:
    rows = mg.Dim("rows", min=2, max=50)
    assert Classifier().max_batch(*forms(rows), memory=10**9) == 50
    assert Classifier().max_batch(*forms(rows), memory=held(20)) == 20

    class Sums(mg.Graph):
        def build(self, x: Tensor) -> Tensor:
            return (x * 2).sum()

    width = mg.Dim("width", max=10_000)
    assert Sums().max_batch(mg.spec((4, width)), memory=2 * 4 * 4 * 100 + 4) == 100
    with pytest.raises(mg.DefinitionError, match="one size"):
        Sums().max_batch(mg.spec((rows, width)), memory=10**6)


def test_a_step_that_fixes_its_sizes_is_planned_at_each() -> None:
    class Branching(mg.Graph):
        def build(self, x: Tensor) -> Tensor:
            return (x * 2).exp() if x.shape[0] > 20 else x * 2

    def total(rows: int) -> int:
        return Branching().memory(mg.spec((rows, 8))).total_bytes

    for memory in (total(12), total(20), total(21), total(40)):
        found = Branching().max_batch(mg.spec((1, 8)), memory=memory)
        assert total(found) <= memory < total(found + 1)


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), "16 GiX", "GiB", True, None])
def test_what_is_no_number_of_bytes_is_refused(memory: Any) -> None:
    with pytest.raises(mg.DefinitionError, match="no number of bytes"):
        Classifier().max_batch(*forms(1), memory=memory)


def test_the_least_possible_is_named() -> None:
    least = held(1)
    with pytest.raises(mg.PlanError, match="smallest batch") as failed:
        Classifier().max_batch(*forms(8), memory=least - 1)
    assert str(least) in failed.value.hint
    assert Classifier().max_batch(*forms(8), memory=least) == 1


def test_arguments_without_a_batch_are_refused() -> None:
    with pytest.raises(mg.DefinitionError, match="no tensor with a batch"):
        mg.trace(lambda x: x * 2).max_batch(mg.spec(()), memory=1000)


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    step = Classifier()
    random, keys = torch.get_rng_state(), step.state_dict().keys()
    step.max_batch(*forms(1), memory=10**6)
    assert step.builds == ()
    assert step.state_dict().keys() == keys
    assert torch.equal(torch.get_rng_state(), random)
    assert not step.state_dict()["optimizer.0"]["state"]
    x, y = torch.randn(4, 16), torch.zeros(4, dtype=torch.int64)
    first = [step(x, y), step(x, y)]
    step.max_batch(*forms(1), memory=10**6)
    assert len(step.builds) == 1
    torch.manual_seed(0)
    again = Classifier()
    assert all(map(torch.equal, first, [again(x, y), again(x, y)]))
    gc.collect()


@pytest.mark.long
def test_a_decoder_without_memory() -> None:
    shape = Shape(layers=2, width=256, heads=8, groups=2, inner=512, words=1000, length=128)
    assert shape.groups < SEVENTY_BILLION.groups
    found = Training(shape).max_batch(mg.spec((1, 128), torch.int64, "meta"), memory=2**30)
    sizes = [
        Training(shape).memory(mg.spec((n, 128), torch.int64, "meta")).total_bytes for n in (found, found + 1)
    ]
    assert sizes[0] <= 2**30 < sizes[1]


def test_memory_may_have_a_unit() -> None:
    assert Classifier().max_batch(*forms(1), memory="1 MB") == Classifier().max_batch(*forms(1), memory=10**6)
    for wrong in ("1 XB", "16", "0 MiB", "", None):
        with pytest.raises(mg.DefinitionError, match="no number of bytes"):
            Classifier().max_batch(*forms(1), memory=wrong)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_memory_budget_is_a_limit_too() -> None:
    def budgeted(budget: Any) -> Classifier:
        step = Classifier()
        step.config.set_memory_budget(budget)
        return step

    budget = 40_000
    found = budgeted(budget).max_batch(*forms(3), memory="16 MiB")
    budgeted(budget).compile(*forms(found))
    with pytest.raises(mg.errors.PlanError, match="at least"):
        budgeted(budget).compile(*forms(found + 1))
    assert budgeted(budget).max_batch(*forms(3), memory=30_000) < found
    with pytest.raises(mg.errors.PlanError, match=r"smallest batch, 1, does not fit into the memory budget"):
        budgeted(100).max_batch(*forms(3), memory="16 MiB")
