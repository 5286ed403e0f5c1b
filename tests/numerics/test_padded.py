"""A loss that sees the padding is found, and named; a step that does not see it is not."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.padding.language import SIZES, Step, batches, loss_of, usual_buckets
from tests.support import assert_same
from tests.support.steps import line_of


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of padding: not of builds."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in texts if ": build " not in text]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loss_that_ignores_padding(caplog: pytest.LogCaptureFixture, dropout: float) -> None:
    step = Step(*usual_buckets(), dropout=dropout)
    for ids, labels in batches(3, 5, 7, 11):
        step(ids, labels)
    assert not warnings_of(caplog)
    text = step.explain()
    assert "buckets of ids (dim 1), labels (dim 1): padding costs 27.8 % of elements in 4 step(s)" in text
    assert (
        "ids (dim 1) 8: 2 step(s), 25.0 % of elements are padding; the same results as without padding"
        in text
    )
    assert "padding costs 27.8 % of elements in 4 step(s)" in repr(step.config)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loss_that_sees_padding_is_named_once_for_each_bucket(
    caplog: pytest.LogCaptureFixture, dropout: float
) -> None:
    step = Step(*usual_buckets(ignored=0), dropout=dropout)
    ((ids, labels),) = batches(5)
    model = copy.deepcopy(step.model).eval()
    expected = loss_of(model(ids), labels).item()
    seen = loss_of(model(nn.functional.pad(ids, (0, 3))), nn.functional.pad(labels, (0, 3))).item()
    step(ids, labels)
    step(ids, labels)
    step(*batches(7)[0])
    (warning,) = warnings_of(caplog)
    line = line_of("loss", loss_of.__code__.co_filename)
    assert f"result[0] (language.py:{line}" in warning
    assert f"is {seen:.6g} with padding and {expected:.6g} without" in warning
    assert "pad=-100" in warning
    assert "result[1]" not in warning
    step(*batches(9)[0])
    assert len(warnings_of(caplog)) == 2
    assert "the step sees the padding: result[0]" in step.explain()


def test_a_model_that_sees_padding_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)

    step.config.buckets(mg.buckets("x", 1, SIZES))
    step(torch.ones(2, 3))
    (warning,) = warnings_of(caplog)
    assert "result (test_padded.py" in warning
    assert "up to 0.25 away" in warning


def test_the_comparison_has_no_effect() -> None:
    def trained(*, compare: bool) -> Any:
        step = Step(*usual_buckets(), dropout=0.5, compare=compare)
        torch.manual_seed(1)
        losses = [step(ids, labels)[0] for ids, labels in batches(3, 5, 7, 11)]
        return losses, step.state_dict(), torch.get_rng_state(), len(step.builds)

    assert_same(trained(compare=False), trained(compare=True))


def test_other_random_numbers_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand_like(x)).sum()

    step.config.buckets(mg.buckets("x", 1, SIZES))
    step(torch.ones(2, 3))
    assert not warnings_of(caplog)
    assert "not compared: the step draws random numbers" in step.explain()


def test_a_step_that_runs_with_buckets_only(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> Any:
        return x.unflatten(1, (-1, 4)).sum(), x * 2

    step.config.buckets(mg.buckets("x", 1, SIZES))
    total, doubled = step(torch.ones(2, 3))
    assert total == 6
    assert doubled.shape == (2, 3)  # by the results with other buckets
    assert not warnings_of(caplog)
    assert "not compared: without padding the step raises" in step.explain()


def test_half_of_a_size_is_not_taken_for_the_size(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> Any:
        return x[:, ::2] * 1, x[:, 1:] * 1, x.repeat(1, 2), x.new_zeros(2, 8)

    step.config.buckets(mg.buckets("x", 1, [8]))
    half, shorter, twice, fixed = step(torch.ones(2, 7))
    assert half.shape == (2, 4)
    assert shorter.shape == (2, 6)
    assert twice.shape == (2, 16)  # left as it is
    assert fixed.shape == (2, 8)
    assert len(warnings_of(caplog)) == 2
    for name, warning in zip(("result[0]", "result[2]"), warnings_of(caplog), strict=True):
        assert f"{name} is not cut back with x (dim 1) from 7 to 8" in warning
    half, shorter, twice, fixed = step(torch.ones(2, 4))
    assert half.shape == (2, 4)  # which 4 of 8 are padding is not known
    assert shorter.shape == (2, 3)


def test_sizes_beyond_the_largest_bucket(caplog: pytest.LogCaptureFixture) -> None:
    step = Step(*usual_buckets())
    for ids, labels in batches(17, 20, 30):
        assert step(ids, labels)[1].shape[1] == ids.shape[1]
    (warning,) = warnings_of(caplog)
    assert "ids (dim 1) has the size 17" in warning
    assert "ids (dim 1) larger than the largest: 3 step(s), 0.0 %" in step.explain()


def test_a_number_that_is_a_size_is_named(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> Any:
        return x.sum(), x.shape[1]

    step.config.buckets(mg.buckets("x", 1, SIZES))
    step(torch.ones(2, 3))
    (warning,) = warnings_of(caplog)
    assert "result[1] is 4 with padding and 3 without" in warning.replace(" (forward)", "")


def test_side_effects_of_the_step_without_padding_are_put_back() -> None:
    class Counting(Step):
        def __init__(self, *buckets: Any) -> None:
            super().__init__(*buckets)
            self.steps, self.seen = 0, {"last": 0}
            self.norm = nn.BatchNorm1d(8, affine=False)

        def build(self, ids, labels):  # type: ignore[no-untyped-def, override]
            self.steps += 1
            self.seen["last"] = self.steps
            self.norm(self.model.embedding(ids).flatten(0, 1))
            return super().build.__wrapped__(self, ids, labels)  # type: ignore[attr-defined]

    step = Counting(*usual_buckets())
    for number, (ids, labels) in enumerate(batches(3, 5, 7, 11)):
        step(ids, labels)
        assert step.steps == step.seen["last"] == number + 1
        assert step.norm.num_batches_tracked == number + 1


def test_other_results_of_the_same_bucket(caplog: pytest.LogCaptureFixture) -> None:
    @mg.trace
    def step(x: torch.Tensor, *, with_hidden: bool = False) -> Any:
        return (x * 2, x.t() + 1) if with_hidden else x.sum()

    step.config.buckets(mg.buckets("x", 1, SIZES))
    assert step(torch.ones(2, 3)) == 6
    assert step(torch.ones(2, 2)) == 4
    doubled, turned = step(torch.ones(2, 3), with_hidden=True)
    assert doubled.shape == (2, 3)
    assert turned.shape == (3, 2)
    assert not warnings_of(caplog)


def test_a_comparison_says_that_it_is_of_padded_arguments() -> None:
    step = Step(*usual_buckets())
    report = step.verify(*batches(5)[0])
    assert "compared on padded arguments: ids (dim 1)" in str(report)
    assert str(report).splitlines()[2].endswith("from 5 to 8")
    assert "padded" not in str(step.verify(*batches(8)[0]))
