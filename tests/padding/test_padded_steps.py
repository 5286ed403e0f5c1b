"""Steps on padded arguments are those of eager mode on the padded batch, with the results cut back."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.padding.resize import resized
from tests.padding.language import IGNORED, SIZES, Model, Step, batches, loss_of, usual_buckets
from tests.support import assert_same

LENGTHS = (3, 5, 4, 8, 7, 11, 16, 20, 3)


def padded(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """By plain PyTorch, to the smallest bucket."""
    size = next((size for size in SIZES if size >= tensor.shape[1]), tensor.shape[1])
    return nn.functional.pad(tensor, (0, size - tensor.shape[1]), value=pad)


@pytest.mark.parametrize("backend", ["aten", "auto"])
def test_steps_have_the_bits_of_eager_mode_on_the_padded_batch(backend: str) -> None:
    step, model = Step(*usual_buckets(), backend=backend), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for ids, labels in batches(*LENGTHS):
        loss, logits = step(ids, labels)
        optimizer.zero_grad()
        expected = model(padded(ids, 0))
        expected_loss = loss_of(expected, padded(labels, IGNORED))
        expected_loss.backward()
        optimizer.step()
        assert_same(expected_loss.detach(), loss)
        assert_same(expected[:, : ids.shape[1]].detach().contiguous(), logits.contiguous())
        assert_same(model.state_dict(), step.model.state_dict())
        assert_same(optimizer.state_dict(), step.state_dict()["optimizer.0"])
    assert len(step.builds) <= 4  # three buckets, and 20


@pytest.mark.long
def test_compiled_steps_are_near_those_of_eager_mode(caplog: pytest.LogCaptureFixture) -> None:
    step, other = Step(*usual_buckets(), backend="inductor"), Step()
    for ids, labels in batches(5, 8, 7, 3):
        got, expected = step(ids, labels), other(ids, labels)
        for one, two in zip(got, expected, strict=True):
            assert torch.allclose(one, two, atol=1e-4)
    assert not [record for record in caplog.records if "padding" in record.getMessage()]


def test_each_bucket_has_a_build_of_its_own_if_no_size_varies() -> None:
    step = Step(*usual_buckets())
    step.config.dynamic(False)
    for ids, labels in batches(*LENGTHS):
        step(ids, labels)
    assert len(step.builds) == 4  # three buckets, and 20


def test_gradients_are_those_of_the_padded_batch() -> None:
    step, model = Step(*usual_buckets()), Model()
    step.config.keep_gradients()
    for ids, labels in batches(5, 6):
        model.load_state_dict(step.model.state_dict())
        model.zero_grad()
        loss_of(model(padded(ids, 0)), padded(labels, IGNORED)).backward()
        for parameter in step.model.parameters():
            parameter.grad = None
        step(ids, labels)
        assert_same([p.grad for p in model.parameters()], [p.grad for p in step.model.parameters()])


def test_random_numbers_are_those_of_the_padded_step() -> None:
    step, model = Step(*usual_buckets(), dropout=0.5), Model(0.5)
    ((ids, labels),) = batches(5)
    torch.manual_seed(3)
    expected = loss_of(model(padded(ids, 0)), padded(labels, IGNORED))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loss, _ = step(ids, labels)
    assert_same(expected.detach(), loss)
    assert torch.equal(after, torch.get_rng_state())


def test_eager_verify_and_many_know_the_buckets() -> None:
    step, other = Step(*usual_buckets()), Step(*usual_buckets())
    ((ids, labels),) = batches(6)
    assert step.verify(ids, labels).ok
    assert step.explain().count("step(s),") == 0  # what is looked at is not counted
    loss, logits = step(ids, labels)
    eager_loss, eager_logits = other.eager(ids, labels)
    assert_same((eager_loss.detach(), eager_logits.detach()), (loss, logits))
    stacked, _ = step.many(ids.expand(7, 3, 6), labels.expand(7, 3, 6))
    assert stacked.shape == (7,)
    losses = torch.stack([other(ids, labels)[0].detach() for _ in range(7)])
    assert_same(losses, stacked)


def test_compile_makes_the_build_of_the_bucket() -> None:
    step = Step(*usual_buckets())
    step.compile(mg.spec((3, 6), torch.int64), mg.spec((3, 6), torch.int64))
    step(*batches(7)[0])
    assert len(step.builds) == 1


def test_a_copy_has_the_buckets() -> None:
    step = Step(*usual_buckets())
    step(*batches(5)[0])
    for made in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert made.config.settings.buckets == step.config.settings.buckets
        assert "step(s)" not in repr(made.config)
        _, logits = made(*batches(6)[0])
        assert logits.shape[1] == 6
        assert len(made.builds) == 1


def test_several_dimensions_each_by_buckets_of_its_own() -> None:
    @mg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 2, (x * 2).sum(), y.transpose(0, 1) + 1, x.flatten()

    step.config.buckets(
        mg.buckets("x", 0, [4, 8]), mg.buckets("x", 1, [6, 12]), mg.buckets("y", -1, [6, 12], pad=1.5)
    )
    for rows, size in ((3, 5), (2, 6), (4, 3), (7, 9), (8, 12), (3, 4)):
        x, y = torch.randn(rows, size), torch.randn(2, size)
        doubled, total, turned, flat = step(x, y)
        assert_same(x * 2, doubled.contiguous())
        assert_same((y.t() + 1).contiguous(), turned.contiguous())
        assert torch.allclose(total, (x * 2).sum(), atol=1e-5)
        assert flat.numel() == (4 if rows < 5 else 8) * (6 if size < 7 else 12)
    assert len(step.builds) == 2


def test_equal_sizes_of_two_groups_are_not_mixed_up() -> None:
    @mg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    step.config.buckets(mg.buckets("x", 0, [8], group="rows"), mg.buckets("x", 1, [8], group="columns"))
    for shape in ((5, 5), (5, 6), (7, 3), (8, 2), (5, 8)):
        assert step(torch.randn(shape)).shape == shape[::-1]


@pytest.mark.parametrize("path", ["batch.ids", "batch['ids']", 'batch["ids"]'])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_tensors_in_containers(path: str, kind: Any) -> None:
    @mg.trace
    def step(batch: Any) -> torch.Tensor:
        return (batch["ids"] if isinstance(batch, dict) else batch.ids) + 1

    step.config.buckets(mg.buckets(path, 1, SIZES))
    batch = kind(ids=torch.arange(10).reshape(2, 5))
    assert_same(torch.arange(10).reshape(2, 5) + 1, step(batch).contiguous())
    found = batch["ids"] if isinstance(batch, dict) else batch.ids
    assert found.shape == (2, 5)
    assert step.builds[0].program.text.count("[2, 8]")


def test_a_tensor_in_a_list() -> None:
    @mg.trace
    def step(batch: Any) -> torch.Tensor:
        return batch[1] + 1

    step.config.buckets(mg.buckets("batch[1]", 0, SIZES))
    assert_same(torch.ones(3) + 1, step([torch.ones(3), torch.ones(3)]))


def test_a_mask_is_made_or_padded() -> None:
    @mg.trace
    def step(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        if mask is None:
            return x.mean() * scale, torch.tensor(True)
        return (x * mask).sum() / mask.sum() * scale, mask

    step.config.buckets(mg.buckets("x", 1, SIZES, pad=9.0, mask="mask"))
    for args, kwargs in (
        ((), {}),
        ((None,), {}),
        ((), {"mask": None}),
        ((), {"scale": 1.0}),
        ((None, 1.0), {}),
    ):
        x = torch.randn(2, 5)
        mean, mask = step(x, *args, **kwargs)
        assert torch.allclose(mean, x.mean(), atol=1e-6)
        assert_same(torch.ones(2, 5, dtype=torch.bool), mask.contiguous())
    x = torch.randn(2, 8)  # a full bucket has a mask, too
    assert_same(torch.ones(2, 8, dtype=torch.bool), step(x)[1])
    given = torch.tensor([[1.0, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    x = torch.randn(2, 5)
    mean, mask = step(x, given)
    assert torch.allclose(mean, (x * given).sum() / 4)
    assert_same(given, mask.contiguous())


def test_a_mask_of_rows_and_columns() -> None:
    @mg.trace
    def step(x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        assert mask is not None
        return (x * mask).sum() / mask.sum(), mask

    step.config.buckets(mg.buckets("x", 0, [4], pad=3.0), mg.buckets("x", 1, SIZES, pad=2.0, mask="mask"))
    for shape in ((3, 5), (4, 7), (2, 8), (4, 8)):
        x = torch.randn(shape)
        mean, mask = step(x)
        assert torch.allclose(mean, x.mean(), atol=1e-6)
        assert_same(torch.ones(shape, dtype=torch.bool), mask.contiguous())
    assert len(step.builds) == 1


def test_a_mask_along_the_first_dimension() -> None:
    @mg.trace
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[:, None]).sum() / mask.sum()

    step.config.buckets(mg.buckets("x", 0, [4, 8], pad=7.0, mask="mask"))
    for rows in (3, 5, 8):
        x = torch.randn(rows, 2)
        assert torch.allclose(step(x), x.sum() / rows, atol=1e-6)


def test_what_the_step_writes_into_an_argument_is_written_back() -> None:
    @mg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x

    step.config.buckets(mg.buckets("x", 0, SIZES))
    for _ in range(3):
        x = torch.zeros(5)
        assert step(x) is x
        assert_same(torch.ones(5), x)
    y = torch.zeros(5)
    assert step.eager(y) is y
    assert_same(torch.ones(5), y)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0),
        torch.randn(2, 3, 4, 5, dtype=torch.float64),
        torch.ones(2, 3, 4, 5, dtype=torch.bool),
        torch.full((2, 3, 4, 5), 2**60 + 1),
    ],
    ids=["channels last", "permuted", "float64", "bool", "large"],
)
def test_values_types_and_the_order_of_strides_stay(x: torch.Tensor) -> None:
    x.note = "mine"  # type: ignore[attr-defined]
    for dim in range(4):
        copy = resized(x, dim, 8, 1)
        rest = copy.narrow(dim, x.shape[dim], 8 - x.shape[dim])
        assert_same(x.contiguous(), copy.narrow(dim, 0, x.shape[dim]).contiguous())
        assert_same(torch.ones_like(rest).contiguous(), rest.contiguous())
        assert order_of(copy) == order_of(x)
        assert copy.note == "mine"
        assert_same(x.contiguous(), resized(copy, dim, x.shape[dim], 0).contiguous())


def order_of(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))


def test_parts_of_larger_tensors_need_no_builds_of_their_own() -> None:
    step, other = Step(*usual_buckets()), Step(*usual_buckets())
    for length in (5, 8, 8, 7):
        tokens = torch.arange(3 * (length + 1)).reshape(3, -1) % 23
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        assert_same(other(ids.contiguous(), labels.contiguous()), step(ids, labels))
    assert len(step.builds) == len(other.builds) == 1


@pytest.mark.parametrize("size", [5, 8, 9])
def test_a_part_of_a_larger_tensor_that_is_a_result(size: int) -> None:
    @mg.trace
    def step(x: torch.Tensor) -> Any:
        x.mul_(2)
        return x, x + 1

    step.config.buckets(mg.buckets("x", 0, [8]))
    whole = torch.ones(size, 3)
    part = whole[:, 1]
    same, more = step(part)
    assert same is part
    assert_same(torch.full((size,), 3.0), more)
    assert_same(torch.tensor([1.0, 2, 1]).expand(size, 3).contiguous(), whole)


def test_marked_arguments_and_accumulation() -> None:
    class Accumulating(Step):
        def build(self, ids, labels, weight):  # type: ignore[no-untyped-def, override]
            logits = self.model(ids) * weight[: ids.shape[1], None]
            loss = loss_of(logits, labels)
            loss.backward()
            return loss, logits

    step = Accumulating(*usual_buckets(), mg.buckets("weight", 0, SIZES))
    step.config.set_gradient_accumulation_steps(2)
    ((ids, labels),) = batches(5, rows=4)
    loss, logits = step(ids, labels, mg.replicated(torch.ones(5)))
    assert loss.shape == (2,)
    assert logits.shape[:2] == (4, 5)


def test_none_takes_the_buckets_away() -> None:
    step = Step(*usual_buckets())
    step(*batches(5)[0])
    step.config.buckets(None)
    assert step(*batches(5)[0])[1].shape[1] == 5
    assert len(step.builds) == 2
    assert "buckets=[]" in repr(step.config)
