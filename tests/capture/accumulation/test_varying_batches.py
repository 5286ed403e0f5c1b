"""Batches that vary under gradient accumulation: one build for all that are split into micro-batches of two rows or more."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.capture.accumulation.loop import Case, Net, Side, TrainStep, loss_of, plain_loop, with_rows
from tests.capture.accumulation.test_accumulation import CASES, graph_loop
from tests.support import assert_same
from tests.support.choice import only_quick

MICRO_ROWS = (3, 2, 4, 3, 5)  # of a micro-batch, in one call after the other
QUICK = ("two_losses", "replicated", "scaler")
VARYING = [
    case for case in CASES if case.name != "carried"
]  # which keeps what has the rows of the last batch


def assert_few_builds(case: Case, micro_rows: Sequence[int] = MICRO_ROWS, *, builds: int = 2) -> TrainStep:
    case = replace(case, rows=tuple(rows * case.steps for rows in micro_rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about results that are no batches
        expected, side = plain_loop(case), Side(case)
        step = TrainStep(case, side)
        assert_same(expected, graph_loop(case, step, side))
    assert 2 <= len(step.builds) <= builds, step.explain()
    return step


@pytest.mark.parametrize("name", only_quick([case.name for case in VARYING], *QUICK))
def test_steps_have_two_builds(name: str) -> None:
    assert_few_builds(next(case for case in VARYING if case.name == name))


class Plain(Net):
    """Takes single rows, too, and knows how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        return super().forward(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x)).relu()


def images(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(40, 3, 5, 7, generator=generator),)


def channels_last(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (images(generator)[0].contiguous(memory_format=torch.channels_last),)


def by_rows(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(model.rows)
    return model.rows


def of_maps(model: Any, x: torch.Tensor) -> Any:
    made = model(x)
    return [made.square().mean()], made


Forward = Callable[[Any, torch.Tensor, torch.Tensor], Any]
FORWARDS: dict[str, Forward] = {
    "sum by rows": lambda m, x, y: (
        [F.cross_entropy(m(x), y, reduction="sum") / x.shape[0]],
        torch.arange(len(x)),
    ),
    "drawn order": lambda m, x, y: ([loss_of(m, x[torch.randperm(x.shape[0])], y)], None),
    "number of rows": lambda m, x, y: ([loss_of(m, x, y)], [x.shape[0], x.numel()]),
    "each with each": lambda m, x, y: ([loss_of(m, x, y) + (x @ x.t()).mean()], x @ x.t()),
    "first rows": lambda m, x, y: ([loss_of(m, x, y)], m(x)[:2]),
    "turned": lambda m, x, y: ([loss_of(m, x, y)], (m(x).t(), x.t().contiguous())),
    "doubled": lambda m, x, y: ([loss_of(m, torch.cat([x, x]), torch.cat([y, y]))], torch.cat([x, x])),
    "changed in place": lambda m, x, y: ([loss_of(m, x.clone(), y)], x.add_(1)),
}
OTHERS = [
    *(Case(name, model=Plain, forward=forward) for name, forward in FORWARDS.items()),
    Case("update by rows", model=Plain, after=by_rows),
    Case("images", model=Images, batch=images, forward=of_maps),
    Case("channels last", model=Images, batch=channels_last, forward=of_maps),
]


@pytest.mark.parametrize(
    "name",
    only_quick([case.name for case in OTHERS], "number of rows", "turned", "update by rows", "channels last"),
)
def test_other_uses_of_rows(name: str) -> None:
    case = next(case for case in OTHERS if case.name == name)
    single = 0 if case.model is Images else 1
    assert_few_builds(case, (*MICRO_ROWS, *[1, 2][: 2 * single]), builds=2 + single)


def test_a_branch_on_micro_rows_is_a_condition() -> None:
    case = Case("branch", forward=lambda m, x, y: ([loss_of(m, x, y) * (2 if len(x) > 3 else 3)], None))
    step = assert_few_builds(case, builds=3)
    assert "(batch[0].size(0) // 4) <= 3" in step.builds[2].reason


class Step(mg.Graph):
    """Three classes; four micro-batches by default."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.config.backend("aten")
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        return loss, logits


class Reference:
    """The same in plain PyTorch."""

    def __init__(self, step: Step) -> None:
        self.model = copy.deepcopy(step.model.to(nn.Module))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        logits = [self.model(part) for part in x.chunk(steps)]
        losses = [F.cross_entropy(part, wanted) for part, wanted in zip(logits, y.chunk(steps), strict=True)]
        for loss in losses:
            (loss / steps).backward()
        self.optimizer.step()
        return [torch.stack(losses), torch.cat(logits)]


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 6), torch.randint(3, (rows,))


def assert_alike(step: Step, reference: Reference, rows: int, steps: int = 4) -> None:
    given = batch(rows)
    assert_same(reference(*given, steps), list(step(*given)), f"{rows} rows")
    assert_same(reference.model.state_dict(), step.model.state_dict(), f"after {rows} rows")


def test_what_cannot_be_split_is_refused_as_before() -> None:
    step = Step()
    reference = Reference(step)
    for rows in (32, 24):
        assert_alike(step, reference, rows)
    for rows in (10, 3, 1, 26):
        with pytest.raises(mg.SignatureError, match=rf"x has {rows} rows?: .* 4 equal micro-batches"):
            step(*batch(rows))
        with pytest.raises(mg.SignatureError, match="4 equal micro-batches"):
            step(torch.randn(8, 6), torch.randint(3, (rows,)))
        assert_alike(step, reference, 16)
    for rows in (4, 8, 4):
        assert_alike(step, reference, rows)
    assert len(step.builds) == 2


def test_a_single_argument_that_cannot_be_split_is_refused() -> None:
    class Alone(Step):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.model(x).square().mean().backward()
            return x * 2

    step = Alone()
    for rows in (8, 12, 16):
        step(torch.randn(rows, 6))
    for rows in (10, 19, 9):
        with pytest.raises(mg.SignatureError, match=rf"x has {rows} rows"):
            step(torch.randn(rows, 6))


def test_batches_of_other_sizes_than_each_other_are_not_taken_for_equal_ones() -> None:
    class Two(Step):
        def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = self.model(x).square().mean() + y.square().sum()
            loss.backward()
            return loss, x.sum(0), y * 2

    step = Two()
    for first, second in [(8, 8), (12, 12), (16, 16), (20, 12), (8, 16), (24, 8), (16, 16)]:
        x, y = torch.randn(first, 6), torch.randn(second, 6)
        assert_same(y * 2, step(x, y)[2])
    assert len(step.builds) == 3


def test_a_length_that_was_that_of_a_micro_batch() -> None:
    """The names of both are one name as long as they are equal."""

    class Lengths(Step):
        def build(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            loss = self.model(x * mask.sum()).square().mean()
            loss.backward()
            return x * mask.sum()

    step = Lengths()
    for rows, length in [(8, 2), (12, 3), (16, 4), (16, 5), (8, 4), (20, 5)]:
        x, mask = torch.randn(rows, 6), torch.randn(length)
        assert_same(x * mask.sum(), step(x, mg.replicated(mask)))
    assert len(step.builds) == 3


@pytest.mark.every_case
@pytest.mark.parametrize("by", ["config", "one of them", "compile"])
def test_declared_batches_have_one_build(by: str) -> None:
    step = Step()
    reference = Reference(step)
    if by == "config":
        step.config.dynamic("x", 0)
        step.config.dynamic("y", 0)
    elif by == "one of them":
        step.config.dynamic("x", 0)  # labels have as many rows
    else:
        size = mg.Dim("batch", max=64)
        step.compile(mg.spec((size, 6)), mg.spec((size,), torch.int64))
    for rows in (32, 24, 8, 16):
        assert_alike(step, reference, rows)
    assert len(step.builds) == 1
    assert "x_0 * 4" in step.show()


def test_a_declared_batch_whose_number_is_taken_is_an_error() -> None:
    class Taken(Step):
        def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = F.cross_entropy(self.model(x), y) * float(x.shape[0])
            loss.backward()
            return loss

    step = Taken()
    step.config.dynamic("x", 0)
    with pytest.raises(mg.CaptureError, match="the step fixes size 0 of argument x"):
        step(*batch(16))


def test_declared_sizes_of_whole_arguments() -> None:
    class Weighted(Step):
        def build(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            loss = (self.model(x).sum(1) * weights.mean()).mean()
            loss.backward()
            return weights * 2

    step, rows, length = Weighted(), mg.Dim("rows"), mg.Dim("length")
    step.compile(mg.spec((rows, 6)), mg.replicated(mg.spec((length,))))
    for rows_now, length_now in [(8, 7), (16, 3), (12, 12)]:
        weights = torch.randn(length_now)
        got = step(torch.randn(rows_now, 6), mg.replicated(weights))
        assert_same(torch.cat([weights * 2] * 4), got)
    assert len(step.builds) == 1


def test_another_number_of_steps() -> None:
    step = Step()
    reference = Reference(step)
    for steps, rows in [(4, 32), (4, 24), (2, 10), (2, 12), (4, 16), (2, 14), (4, 8), (1, 7), (1, 9), (1, 8)]:
        step.config.set_gradient_accumulation_steps(steps)
        if steps > 1:
            assert_alike(step, reference, rows, steps)
        else:
            assert step(*batch(rows))[1].shape == (rows, 3)
    assert len(step.builds) == 6


def test_what_looks_at_such_builds(tmp_path: Any) -> None:
    step = Step()
    for rows in (32, 24, 16):
        step(*batch(rows))
    assert "as promised" in str(step.verify(*batch(12)))
    assert "[x_0 * 4, 6]" in step.show()
    assert "x_0 = aten.slice.Tensor(x, 0, 0, " in str(step.replay(*batch(20)))
    artifact = mg.load(mg.save(step, tmp_path / "artifact"))
    assert "(4 * x_0)" in str(artifact)
    for rows in (8, 40, 32):
        given = batch(rows)
        assert_same(list(step(*given)), list(artifact(*given)))
    with pytest.raises(mg.SignatureError, match="size 10 in dimension 0; the artifact takes multiples of 4"):
        artifact(*batch(10))
    assert len(step.builds) == 2


def test_many_steps_at_once() -> None:
    step = Step()
    reference = Reference(step)
    for rows in (8, 12, 16):
        x, y = torch.randn(3, rows, 6), torch.randint(3, (3, rows))
        losses, _ = step.many(x, y)
        assert_same(torch.stack([reference(*given, 4)[0] for given in zip(x, y, strict=True)]), losses)
    assert len(step.builds) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["two_losses", "replicated", "scaler"])
def test_compiled_steps_have_two_builds(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    side = Side(case)
    step = TrainStep(case, side)
    step.config.backend("inductor")
    source = torch.Generator().manual_seed(7)
    for rows in (12, 8, 20, 8):
        given = with_rows(case, case.batch(source), rows)
        arguments = [mg.replicated(item) if index in case.whole else item for index, item in enumerate(given)]
        assert "as promised" in str(step.verify(*arguments))
        step(*arguments)
    assert [build.backend for build in step.builds] == ["inductor"] * 2
