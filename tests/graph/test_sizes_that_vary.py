"""Batches and lengths that vary: one build for all sizes, with the bits of eager mode at each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.graph.sized_programs import OTHERS, SMOOTH, Program, Sized
from tests.support import assert_same

SIZES = [(4, 12), (4, 9), (6, 10), (3, 16), (2, 5), (5, 7), (12, 8), (4, 31)]
SPECIAL = [(4, 12), (5, 9), (1, 8), (8, 3), (2, 1), (1, 1), (64, 2), (7, 40), (4, 12)]


class TrainStep(mg.Graph):
    """Forward, backward, update."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.backend(backend)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x)
        loss.backward()
        return loss


def outcome(run: Any, seed: int) -> tuple[Any, str]:
    """What a step gives, or the class of its error."""
    torch.manual_seed(seed)
    try:
        return run().detach().clone(), ""
    except Exception as error:
        return None, str(error)


def assert_trains_alike(program: Program, sizes: list[tuple[int, int]], backend: str = "aten") -> TrainStep:
    plain, traced = Sized(program), Sized(program)
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1), TrainStep(traced, backend)
    source = torch.Generator().manual_seed(1)

    def eager_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        return loss

    for seed, size in enumerate(sizes):
        x = torch.randn(*size, 8, generator=source)
        before = copy.deepcopy(plain.state_dict())
        expected, refused = outcome(lambda x=x: eager_step(x), seed)
        got, error = outcome(lambda x=x: step(x), seed)
        assert bool(refused) == bool(error), f"{size}: {refused or 'no error'} against {error or 'no error'}"
        if refused:
            plain.load_state_dict(before)  # eager mode counts in a buffer before it fails
        else:
            assert_same(torch.nan_to_num(expected), torch.nan_to_num(got), f"loss at {size}")
        assert_same(plain.state_dict(), traced.state_dict(), f"state after {size}")
    return step


@pytest.mark.every_case
@pytest.mark.parametrize("name", list(SMOOTH))
def test_one_build_serves_all_sizes(name: str) -> None:
    step = assert_trains_alike(SMOOTH[name], SIZES)
    assert len(step.builds) <= 3, step.builds  # the first one, for lengths, for batches and lengths


@pytest.mark.parametrize("name", list(OTHERS))
def test_others_have_the_bits_of_eager_mode(name: str) -> None:
    assert_trains_alike(OTHERS[name], SIZES)


@pytest.mark.parametrize("name", [*SMOOTH, *OTHERS])
def test_special_sizes(name: str) -> None:
    assert_trains_alike({**SMOOTH, **OTHERS}[name], SPECIAL)


@pytest.mark.parametrize("backend", ["exact", "auto"])
def test_other_backends(backend: str) -> None:
    assert len(assert_trains_alike(SMOOTH["causal_mask"], SIZES, backend).builds) <= 3


def test_a_branch_on_a_size_is_a_condition() -> None:
    step = assert_trains_alike(OTHERS["branch"], SIZES)
    assert "x.size(1) > 6" in step.explain()
    assert len(step.builds) <= 5


class Evaluation(mg.Graph):
    """The loss of a batch, without gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = self.model(x)
            return loss


def test_an_epoch_with_a_smaller_last_batch_and_an_evaluation() -> None:
    plain, traced = Sized(SMOOTH["normalised"]), Sized(SMOOTH["normalised"])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step, evaluate = TrainStep(traced, "aten"), Evaluation(traced)
    source = torch.Generator().manual_seed(1)
    counts = []
    for _ in range(3):
        for model in (plain, traced):
            model.train()
        for rows in (8, 8, 3):
            x = torch.randn(rows, 6, 8, generator=source)
            optimizer.zero_grad()
            expected = plain(x)
            expected.backward()
            optimizer.step()
            assert_same(expected.detach(), step(x).detach())
        for model in (plain, traced):
            model.eval()
        for rows in (8, 5):
            x = torch.randn(rows, 6, 8, generator=source)
            with torch.no_grad():
                assert_same(plain(x), evaluate(x))
        assert_same(plain.state_dict(), traced.state_dict())
        counts.append((len(step.builds), len(evaluate.builds)))
    assert counts == [(2, 2)] * 3


class Strided(mg.Graph):
    """Looks at the stride of a dimension of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        return (x * 2 if x.stride(1) == 1 else x * 3), (x * 2).stride()


def test_strides_of_sizes_of_one_count() -> None:
    step = Strided()
    for size, layout in [(4, 0), (5, 0), (6, 0), (7, 0), (6, 1), (8, 1), (9, 1), (7, 0), (3, 0)]:
        x = torch.ones(size, 1, 4, 3)
        x = x.to(memory_format=torch.channels_last) if layout else x
        expected, got = step.eager(x), step(x)
        assert torch.equal(expected[0], got[0]), f"{size} {x.stride()}"
        assert expected[1] == got[1], f"{size} {x.stride()}"


class Keeping(mg.Graph):
    """Keeps shapes in objects of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.config.backend("aten")
        self.shapes: list[Any] = []
        self.by_shape: dict[Any, Any] = {}
        self.last: Any = None

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        self.by_shape[x.shape] = x.shape[1:]
        self.last = [x.shape[0], (x.shape[1],)]
        return x * 2


def test_shapes_that_are_kept_hold_plain_numbers() -> None:
    step, expected = Keeping(), [torch.Size(size) for size in SIZES]
    for size in SIZES:
        step(torch.ones(size))
        assert step.last == [size[0], (size[1],)]
    kept = [*step.shapes, *step.by_shape, *step.by_shape.values()]
    assert kept == [*expected, *expected, *[size[1:] for size in expected]]
    assert all(type(number) is int for shape in kept for number in shape)
