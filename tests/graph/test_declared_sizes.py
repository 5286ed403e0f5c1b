"""Sizes that are declared to vary, sizes that a step fixes, and what is said about either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


class Step(mg.Graph):
    """A linear layer, and a function of what it gives."""

    def __init__(self, act: Any = None, backend: str = "aten", momentum: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.act = act or (lambda hidden: hidden)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum)
        self.states = [sgd.state]
        self.add_optimizer(sgd)
        self.config.backend(backend)

    def build(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        loss = self.act(self.model(x)).mean()
        loss.backward()
        return loss


def run_all(step: Step, batches: list[int]) -> list[torch.Tensor]:
    """The losses of a step over batches, each beside eager mode."""
    plain = nn.Linear(4, 4)
    plain.load_state_dict(step.model.state_dict())
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for seed, rows in enumerate(batches):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        expected = step.act(plain(x)).mean()
        expected.backward()
        optimizer.step()
        losses.append(step(x).detach())
        assert_same(expected.detach(), losses[-1], f"loss for {rows} rows")
        assert_same(dict(plain.state_dict()), dict(step.model.state_dict()), f"weights after {rows} rows")
    return losses


def by_config(step: Step) -> None:
    step.config.dynamic("x", 0, max=64)


def by_dim(step: Step) -> None:
    step.compile(mg.spec((mg.Dim("batch", max=64), 4)))


@pytest.mark.parametrize("declare", [by_config, by_dim])
def test_a_declared_size_varies_from_the_first_build_on(declare):
    step = Step()
    declare(step)
    run_all(step, [3, 5, 2, 64, 100])
    assert len(step.builds) == 1
    run_all(step, [1, 7])
    assert len(step.builds) == 1  # with one row the ops are the same, as a capture has shown
    run_all(step, [0, 7])
    assert len(step.builds) == 2


def test_equal_sizes_of_two_arguments_are_one():
    step = Step()
    step.config.dynamic("x", 0)
    step.config.dynamic("others[0]", 0)
    for rows in (3, 5, 8):
        step(torch.randn(rows, 4), torch.randn(rows))
    assert len(step.builds) == 1
    step(torch.randn(3, 4), torch.randn(5))
    assert len(step.builds) == 2


def test_a_size_that_the_step_takes_to_be_a_declared_one_varies_with_it():
    class Labelled(Step):
        def build(self, x, labels, weights):
            loss = nn.functional.cross_entropy(self.model(x) * weights, labels)
            loss.backward()
            return loss, weights.shape[0]

    step = Labelled()
    step.config.dynamic("x", 0)
    for rows in (3, 5, 8):
        _, size = step(torch.randn(rows, 4), torch.randint(4, (rows,)), torch.randn(4))
        assert size == 4
    assert len(step.builds) == 1
    fixed = Labelled(lambda hidden: hidden)
    fixed.config.dynamic("labels", 0)
    fixed.config.dynamic("x", 1)
    with pytest.raises(mg.CaptureError, match="the step fixes size 1 of argument x"):
        fixed(torch.randn(3, 4), torch.randint(4, (3,)), torch.randn(4))


def test_nothing_varies_if_it_is_switched_off():
    step = Step()
    step.config.dynamic(False)
    run_all(step, [3, 5, 7])
    assert len(step.builds) == 3
    step.config.dynamic(True)
    run_all(step, [9, 11, 13])
    assert len(step.builds) == 4


FIXING = {
    "a branch on one size": lambda hidden: hidden * 2 if hidden.shape[0] == 6 else hidden,
    "a loop": lambda hidden: torch.stack([hidden[row] for row in range(hidden.shape[0])]),
    "a float": lambda hidden: hidden * float(hidden.shape[0]),
}


@pytest.mark.parametrize("name", list(FIXING))
@pytest.mark.parametrize("declare", [by_config, lambda step: step.config.dynamic("x", -2)])
def test_a_declared_size_that_the_step_fixes_is_an_error(name, declare):
    step = Step(FIXING[name], momentum=0.9)
    declare(step)
    weight = step.model.weight.clone()
    with pytest.raises(mg.CaptureError, match="the step fixes size 0 of argument x") as caught:
        step(torch.randn(6, 4))
    assert caught.value.where.file == __file__
    assert step.builds == ()
    assert torch.equal(weight, step.model.weight)
    assert step.model.weight.grad is None
    assert step.states == [{}]


@pytest.mark.parametrize("name", list(FIXING))
def test_a_size_that_the_step_fixes_is_a_number_from_then_on(name):
    step = Step(FIXING[name])
    run_all(step, [6, 3, 5, 6, 3, 5])
    assert len(step.builds) == (2 if name == "a branch on one size" else 3)


def test_a_branch_splits_the_sizes():
    step = Step(lambda hidden: hidden * 2 if hidden.shape[0] > 5 else hidden)
    step.config.dynamic("x", 0)
    run_all(step, [3, 8, 4, 6, 5, 9])
    assert len(step.builds) == 2
    assert "x.size(0) <= 5" in step.explain()


WRONG = {
    "no dimension": (("x",), "the name of an argument and a dimension are needed"),
    "no name": ((3, 0), "the name of an argument and a dimension are needed"),
    "an empty range": (("x", 0, 5, 2), "no sizes are in this range"),
    "zero": (("x", 0, 0), "no sizes are in this range"),
    "no number": (("x", 0, 1, 2.5), "no sizes are in this range"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_no_size_is_an_error(case):
    arguments, message = WRONG[case]
    step = Step()
    before = repr(step.config)
    with pytest.raises(mg.MonographError, match=message) as caught:
        step.config.dynamic(*arguments)
    assert caught.value.where.file == __file__
    assert repr(step.config) == before


def test_ranges_that_contradict_are_an_error():
    step = Step()
    step.config.dynamic("x", 0, max=8)
    step.config.dynamic("x", 0, max=8)
    with pytest.raises(mg.MonographError, match=r"has the range of `x.size\(0\), max=8` already"):
        step.config.dynamic("x", 0, max=9)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (("y", 0), "build() was given no such argument"),
        (("x", 2), "argument x has 2 dimensions"),
        (("x", -3), "argument x has 2 dimensions"),
    ],
)
def test_a_size_that_no_argument_has_is_an_error(declared, message):
    step = Step()
    step.config.dynamic(*declared)
    with pytest.raises(mg.MonographError) as caught:
        step(torch.randn(3, 4))
    assert message in str(caught.value)
    assert step.builds == ()


def test_length_of_a_tensor_varies():
    step = Step(lambda hidden: hidden.sum() / len(hidden))
    run_all(step, [3, 5, 8, 2])
    assert len(step.builds) == 2


@pytest.mark.long
def test_compiled_code_serves_all_sizes():
    step = Step(lambda hidden: torch.softmax(hidden @ hidden.t(), 1) / hidden.shape[0], "inductor")
    plain = nn.Linear(4, 4)
    plain.load_state_dict(step.model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in (3, 5, 16, 2, 33):
        x = torch.randn(rows, 4)
        optimizer.zero_grad()
        expected = step.act(plain(x)).mean()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected)
        torch.testing.assert_close(step.model.weight, plain.weight)
    assert [build.backend for build in step.builds] == ["inductor", "inductor"]


class Convolution(mg.Graph):
    """Torch asks for the number of images, and so does build()."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 3))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x * 2 if x.shape[0] > 40 else x)


def test_branches_on_sizes_are_checked_without_data(caplog: pytest.LogCaptureFixture) -> None:
    graph = Convolution()
    graph.compile(mg.spec((mg.Dim("images", max=64), 1, 3, 3)))
    for images in (7, 64, 3, 50):
        x = torch.randn(images, 1, 3, 3)
        assert_same(graph.model.to(nn.Module)(x * 2 if images > 40 else x), graph(x))
    assert len(graph.builds) == 2, [build.reason for build in graph.builds]
    assert "torch has some of its own" in graph.builds[1].reason.advice
    assert "numbers stay" not in caplog.text


class Tokens(mg.Graph):
    """A step on tokens, whose rows and lengths both vary."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Tanh())
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))

    def build(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(ids).mean(1), y)
        loss.backward()
        return loss


@pytest.mark.parametrize(("names", "builds"), [((), 3), (("ids", "y"), 2)])
def test_sizes_that_were_not_declared_vary_by_themselves(names: tuple[str, ...], builds: int) -> None:
    """The length varies from its second value on; one that came first before is no reason for another build."""
    step = Tokens()
    for name in names:
        step.config.dynamic(name, 0)
    for rows, length in ((8, 11), (8, 9), (8, 14), (8, 7), (3, 11), (3, 7), (5, 9)):
        step(torch.randint(50, (rows, length)), torch.randint(8, (rows,)))
    assert len(step.builds) == builds


def test_a_size_that_was_not_declared_may_be_fixed() -> None:
    class Fixed(Tokens):
        def build(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().build(ids, y)
            return loss * float(ids.shape[1])

    step = Fixed()
    step.config.dynamic("ids", 0)
    step.config.dynamic("y", 0)
    for rows, length in ((8, 11), (4, 11), (8, 9), (5, 9), (8, 7)):
        loss = step(torch.randint(50, (rows, length)), torch.randint(8, (rows,)))
        assert loss > length  # at first about 2 * length
    assert len(step.builds) == 3


@pytest.mark.every_case
@pytest.mark.parametrize("path", ['batch["x"]', "batch['x']", "batch.x", "batch"])
def test_a_path_may_be_written_as_python_does(path: str) -> None:
    graph = mg.trace(lambda batch: (batch["x"][:, 0] * batch["y"]).sum())
    graph.config.dynamic(path, 0)
    for rows in (4, 3, 6):
        graph({"x": torch.ones(rows, 2), "y": torch.ones(rows)})
    assert len(graph.builds) == 1


def test_a_path_of_another_argument_is_none() -> None:
    graph = mg.trace(lambda batch: batch["x"].sum())
    graph.config.dynamic("batch['z']", 0)
    with pytest.raises(mg.MonographError, match="build\\(\\) was given no such argument") as caught:
        graph({"x": torch.ones(2)})
    assert 'its arguments are batch["x"]' in caught.value.hint
