"""Sizes of one beside a build for all sizes: served by it where eager mode runs the same ops, and another build where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.internals.internals import internals_of
from tests.support import assert_same

Loss = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.norm, self.place = nn.Linear(4, 8), nn.LayerNorm(8), nn.Parameter(torch.randn(1, 8))
        self.scale, self.loss = 1.0, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


class Step(mg.Graph):
    def __init__(self, model: nn.Module, backend: str = "aten") -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.backend(backend)

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x)
        loss.backward()
        return loss


class Beside:
    """A graph, and eager mode on a copy of its model."""

    def __init__(self, loss: Loss) -> None:
        torch.manual_seed(0)
        self.plain = Model(loss)
        self.optimizer = torch.optim.AdamW(self.plain.parameters())
        self.step = Step(copy.deepcopy(self.plain))

    def run(self, *shape: int) -> int:
        """One step of each; the number of builds there are."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
        self.optimizer.zero_grad()
        expected = self.plain(x)
        expected.backward()
        self.optimizer.step()
        assert_same(expected.detach(), self.step(x).detach(), f"loss for {shape}")
        assert_same(
            dict(self.plain.state_dict()), dict(self.step.model.state_dict()), f"weights after {shape}"
        )
        return len(self.step.builds)


def usual(model: Model, x: Tensor) -> Tensor:
    return model.norm(model.layer(x)).relu().square().mean()


def test_the_build_for_all_sizes_serves_sizes_of_one() -> None:
    beside = Beside(usual)
    assert [beside.run(rows, 4) for rows in (3, 5, 1, 7, 1, 2, 1)] == [1, 2, 2, 2, 2, 2, 2]
    assert beside.run(0, 4) == 3, "no rows at all are another matter"


def test_each_set_of_sizes_of_one_is_asked_about() -> None:
    beside = Beside(usual)
    shapes = [(3, 5, 4), (4, 6, 4), (1, 6, 4), (4, 1, 4), (1, 1, 4), (1, 9, 4), (9, 1, 4), (1, 1, 4)]
    assert [beside.run(*shape) for shape in shapes] == [1, 2, 2, 2, 2, 2, 2, 2]


def test_it_is_served_within_the_builds_that_are_permitted() -> None:
    beside = Beside(usual)
    beside.step.config.max_builds(2)
    with mg.assert_max_builds(2):
        for rows in (3, 5, 1, 7, 1):
            beside.run(rows, 4)


def broadcast(model: Model, x: Tensor) -> Tensor:
    # the gradient of the place is a sum over the rows, but that of one row
    return (model.layer(x) + model.place).square().mean()


def branch(model: Model, x: Tensor) -> Tensor:
    hidden = model.layer(x)
    return hidden.mean() if x.shape[0] == 1 else hidden.square().mean()


def read_at_one(model: Model, x: Tensor) -> Tensor:
    hidden = model.layer(x)
    if x.shape[0] == 1 and model.scale > 1.0:
        hidden = hidden * model.scale
    return hidden.square().mean()


def changed_at_one(model: Model, x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        model.seen = "one"
    return model.layer(x).square().mean()


@pytest.mark.parametrize("loss", [broadcast, branch, changed_at_one])
def test_another_step_is_another_build(loss: Loss) -> None:
    beside = Beside(loss)
    assert [beside.run(rows, 4) for rows in (3, 5, 1, 7, 1, 2, 1)] == [1, 2, 3, 3, 3, 3, 3]


def test_a_build_that_is_not_permitted_leaves_all_as_it_is() -> None:
    beside = Beside(broadcast)
    beside.step.config.max_builds(2)
    for rows in (3, 5):
        beside.run(rows, 4)
    with pytest.raises(mg.CaptureError, match="has 2 builds and would need another"):
        beside.step(torch.randn(1, 4))
    for rows in (7, 3):
        assert beside.run(rows, 4) == 2


def long_at_one(model: Model, x: Tensor) -> Tensor:
    hidden = model.layer(x)
    return hidden.mean() if x.shape[0] == 1 and x.shape[1] > 6 else hidden.square().mean()


def few_rows(model: Model, x: Tensor) -> Tensor:
    # of two sizes that are no ones it is always more
    hidden = model.layer(x)
    return hidden.mean() if x.shape[0] * x.shape[1] > 3 else hidden.square().mean()


def repeated_at_one(model: Model, x: Tensor) -> Tensor:
    hidden = model.layer(x)
    for _ in range(x.shape[1] - 5 if x.shape[0] == 1 else 0):
        hidden = hidden * 1.5
    return hidden.square().mean()


@pytest.mark.parametrize("loss", [long_at_one, few_rows, repeated_at_one])
def test_a_size_of_one_beside_others_that_are_asked_for(loss: Loss) -> None:
    beside = Beside(loss)
    for shape in [(3, 5, 4), (4, 6, 4), (1, 5, 4), (1, 9, 4), (1, 3, 4), (1, 2, 4), (3, 9, 4)]:
        beside.run(*shape)


def test_a_size_that_the_build_has_fixed_is_no_name_of_the_other_capture() -> None:
    beside = Beside(lambda model, x: model.layer(x).diff(dim=1).square().mean())
    for shape in [(3, 5, 4), (4, 6, 4), (1, 6, 4), (9, 3, 4), (2, 2, 4), (1, 2, 4), (5, 2, 4)]:
        beside.run(*shape)


ONES, TWOS = torch.ones(8), torch.full((8,), 2.0)


def found(model: Model, x: Tensor) -> Tensor:
    return (model.layer(x) * (ONES if x.shape[0] == 1 else TWOS)).square().mean()


def written(model: Model, x: Tensor) -> Tensor:
    return (model.layer(x) * torch.tensor(1.0 if x.shape[0] == 1 else 2.0)).square().mean()


def sign_of_zero(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).square().mean() * torch.tensor(-0.0 if x.shape[0] == 1 else 0.0)


@pytest.mark.parametrize("loss", [found, written, sign_of_zero])
def test_the_same_ops_on_another_tensor_are_another_step(loss: Loss) -> None:
    beside = Beside(loss)
    assert [beside.run(rows, 4) for rows in (3, 5, 1, 7, 1, 2, 1)] == [1, 2, 3, 3, 3, 3, 3]


def test_literals_that_are_equal_are_the_same() -> None:
    beside = Beside(lambda model, x: (model.layer(x) * torch.tensor([1.0, -0.0] * 4)).square().mean())
    assert [beside.run(rows, 4) for rows in (3, 5, 1, 7, 1)] == [1, 2, 2, 2, 2]


class Counted(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config.backend("aten")

    def build(self, x: Tensor, step: int) -> Tensor:
        hidden: Tensor = self.model(x)
        return hidden * step if x.shape[0] > 1 or step < 7 else hidden


def test_an_int_that_moves_beside_a_size_of_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    step = Counted(model)
    for number, rows in enumerate([3, 5, 4, 1, 6, 1, 1, 1, 3, 1], start=1):
        x = torch.randn(rows, 4)
        expected = model(x) * (number if rows > 1 or number < 7 else 1)
        assert_same(expected.detach(), step(x, number).detach(), f"step {number}")


def test_what_is_read_at_one_alone_still_counts() -> None:
    beside = Beside(read_at_one)
    for rows in (3, 5, 1, 7):
        beside.run(rows, 4)
    beside.plain.scale = beside.step.model.scale = 2.0
    for rows in (5, 1, 7, 1):
        beside.run(rows, 4)


def test_changes_at_one_are_made() -> None:
    beside = Beside(changed_at_one)
    for rows in (3, 5):
        beside.run(rows, 4)
    assert not hasattr(beside.step.model, "seen")
    beside.run(1, 4)
    assert beside.step.model.seen == "one"


def test_tools_answer_for_it() -> None:
    beside = Beside(usual)
    for rows in (3, 5, 1):
        beside.run(rows, 4)
    assert beside.step.verify(torch.randn(1, 4)).ok
    assert len(beside.step.builds) == 2


def test_artifacts_take_it(tmp_path: Path) -> None:
    beside = Beside(usual)
    for shape in [(3, 5, 4), (4, 6, 4), (1, 6, 4), (4, 1, 4)]:
        beside.run(*shape)
    mg.save(beside.step, tmp_path / "step")
    loaded = mg.load(tmp_path / "step")
    for shape in [(1, 8, 4), (7, 8, 4)]:
        x = torch.randn(*shape)
        assert_same(beside.step(x).detach(), loaded(x).detach(), f"{shape}")


@pytest.mark.long
def test_compiled_steps_serve_it_or_leave_it_to_single_ops() -> None:
    for loss, backends in (
        (usual, ["inductor", "inductor"]),
        (broadcast, ["inductor", "inductor", "aten"]),
    ):
        beside = Beside(loss)
        step = Step(copy.deepcopy(beside.plain), "inductor")
        for rows in (3, 5, 1, 7, 1):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
            beside.optimizer.zero_grad()
            expected = beside.plain(x)
            expected.backward()
            beside.optimizer.step()
            torch.testing.assert_close(step(x), expected)
            torch.testing.assert_close(dict(step.model.state_dict()), dict(beside.plain.state_dict()))
        assert [build.backend for build in step.builds] == backends
        assert bool(internals_of(step).upgrades.pending) == ("aten" in backends), "compiled if it comes often"
