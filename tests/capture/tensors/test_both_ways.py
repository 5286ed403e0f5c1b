"""Programs that are copied op by op are those of a second trace, and plain steps have no part that needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from benchmarks.capture import Step as Training
from benchmarks.workload import seeded_batches, seeded_model
from benchmarks.workloads import all_workloads
from tests.capture.optimizers.test_alike_parameters import OPTIMIZERS, Net, Step, batch
from tests.stress.view_programs import check
from tests.support import same_bits
from tests.support.both_ways import compared_ways
from tests.support.choice import only_quick

Tensor = torch.Tensor
X = torch.linspace(-2.0, 2.0, 24).reshape(4, 6).sin() * 3


@pytest.mark.parametrize("name", only_quick(OPTIMIZERS, "adamw"))
def test_a_training_step_is_copied(name: str):
    torch.manual_seed(0)
    model = Net()
    with compared_ways() as seen:
        Step(model, OPTIMIZERS[name](model))(*batch())
    assert seen.steps == 1
    assert not seen.of


@pytest.mark.parametrize("name", only_quick(sorted(all_workloads(smoke=True)), "mlp64", "lstm", "dlrm"))
def test_a_workload_is_copied(name: str):
    workload = all_workloads(smoke=True)[name]
    with compared_ways() as seen:
        Training(seeded_model(workload), workload.loss)(*seeded_batches(workload)[0])
    assert seen.steps == 1
    assert not seen.of


def by_statistics(x: Tensor) -> Tensor:
    mean, variance = torch.zeros(6), torch.ones(6)
    first = F.batch_norm(x, mean, variance, training=True)
    return first + F.batch_norm(x, mean, variance) + F.batch_norm(x, None, None, training=True) + mean


def drawn(x: Tensor) -> tuple[Tensor, ...]:
    return torch.empty_like(x).normal_(), torch.empty_like(x).bernoulli_(), torch.zeros_like(x).uniform_(-1)


@pytest.mark.parametrize("function", [by_statistics, drawn])
def test_statistics_and_random_numbers_are_copied(function: Callable[[Tensor], Any]):
    torch.manual_seed(3)
    expected = function(X)
    with compared_ways() as seen:
        graph = mg.trace(function)
        torch.manual_seed(3)
        made = graph(X)
    assert not seen.of
    both = [item if isinstance(item, tuple) else (item,) for item in (made, expected)]
    assert all(map(same_bits, *both))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_lists_and_clipped_gradients_are_copied(kind: Any, foreach: bool):
    class Clipped(Step):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(F.dropout(self.model(x), 0.1), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=foreach)
            return loss

    torch.manual_seed(0)
    model = Net()
    with compared_ways() as seen:
        Clipped(model, kind(model.parameters(), 0.01, foreach=foreach))(*batch())
    assert not seen.of


def a_column(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y[:, 0] = 1
    return y, y.sum(0)


def a_row_of_a_transposed_tensor(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.t()[1].mul_(3.0)
    return y, y.sum(0)


def views_before_a_write(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    flat, part, turned = y.view(-1), y[1:3], y.permute(1, 0).unsqueeze(0)
    flat.add_(1.0)
    part.mul_(2.0)
    y.relu_()
    return flat, part, turned, turned.sum(1), y


def a_view_of_what_was_written(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.add_(1.0)
    part = y[:, 1:4:2]
    y.neg_()
    part.sub_(1.0)
    return part, y, part.sum(), y.sum(1)


def what_is_read_before_and_after(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    before = y.sum()
    y.copy_(before)
    between = y.detach().sum()
    y.detach().zero_()
    return before, between, y


def an_argument(x: Tensor) -> tuple[Tensor, ...]:
    x.view(-1)[2:5].fill_(7.0)
    x.mul_(x.sum())
    return x.sum(), x[0]


WRITES: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
    a_column,
    a_row_of_a_transposed_tensor,
    views_before_a_write,
    a_view_of_what_was_written,
    what_is_read_before_and_after,
    an_argument,
]


@pytest.mark.every_case
@pytest.mark.parametrize("function", WRITES, ids=lambda item: item.__name__)
def test_writes_through_views_are_copied(function: Callable[[Tensor], tuple[Tensor, ...]]):
    given, expected_given = X.clone(), X.clone()
    expected = function(expected_given)
    with compared_ways() as seen:
        made = mg.trace(function)(given)
    assert not seen.of
    assert all(map(same_bits, [*made, given], [*expected, expected_given]))


def test_what_has_to_be_replayed_is_and_the_rest_is_copied():
    def mixed(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, x + 1
        y.unfold(1, 3, 3).mul_(2.0)
        z.add_(y)
        y.diagonal().add_(z.sum())
        return y, z, y.sum(), z.exp_()

    with compared_ways() as seen:
        made = mg.trace(mixed)(X)
    assert 0 < seen.replayed < seen.ops - 6
    assert "aten.exp_.default" not in seen.of
    assert all(map(same_bits, made, mixed(X)))


def test_layouts_that_a_pure_op_would_change_are_replayed():
    def masked(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).t().clone(memory_format=torch.preserve_format)
        y.masked_fill_(y > 0.5, 0.25)
        return y, y.sum(0)

    def less(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        y.lt_(0.5)
        y.mul_(x.double().sum())
        return y, y.sum(0)

    for function in (masked, less):
        with compared_ways():
            made = mg.trace(function)(X)
        expected = function(X)
        assert all(map(same_bits, made, expected))
        assert [item.stride() for item in made] == [item.stride() for item in expected]


@pytest.mark.parametrize(
    "seeds",
    [
        *only_quick([range(n, n + 10) for n in range(0, 80, 10)], range(10)),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.search) for n in range(80, 200, 10)),
    ],
)
def test_random_programs(seeds: range):
    with compared_ways() as seen:
        outcomes = [check(seed) for seed in seeds]
    assert not [item for item in outcomes if item.startswith("WRONG")]
    assert seen.steps > len(seeds) // 2
    assert seen.replayed < seen.ops // 2


def through_cells(kind: type[nn.RNNCellBase]) -> Callable[[Tensor], Tensor]:
    cell = kind(6, 6)

    def run(x: Tensor) -> Tensor:
        state: Any = x.tanh()
        for _ in range(3):
            state = cell(x) if state is None else cell(x, (state, x) if kind is nn.LSTMCell else state)
            state = state[0] if kind is nn.LSTMCell else state
        return state

    return run


def in_place_on_pieces(x: Tensor) -> tuple[Tensor, ...]:
    whole = x * 2
    first, second, third = torch.ops.aten.unsafe_split.Tensor(whole, 2, 1)
    first.sigmoid_()
    part = second[1:]
    second.mul_(first)
    return first, part.sum(), second.detach(), third.tanh_()


def in_place_on_rows(x: Tensor) -> tuple[Tensor, ...]:
    first, second = torch.ops.aten.unsafe_split.Tensor(x * 2, 2, 0)
    return first.sigmoid_(), second.add_(first).relu_()


@pytest.mark.parametrize(
    "function",
    [*map(through_cells, (nn.LSTMCell, nn.GRUCell, nn.RNNCell)), in_place_on_pieces, in_place_on_rows],
)
def test_pieces_of_a_split_that_are_written_are_copied(function: Callable[[Tensor], Any]):
    expected = function(X)
    with compared_ways() as seen:
        made = mg.trace(function)(X)
    assert not seen.of
    both = [item if isinstance(item, tuple) else (item,) for item in (made, expected)]
    assert all(map(same_bits, *both))


def a_part_of_a_piece(x: Tensor) -> tuple[Tensor, ...]:
    first, second, _ = torch.ops.aten.unsafe_split.Tensor(x * 2, 2, 1)
    first[1:3].mul_(3.0)
    first.t().add_(1.0)
    second.sigmoid_()
    return first, second


def rows_between_others(x: Tensor) -> tuple[Tensor, ...]:
    """Written together with memory of another kind."""
    first, second, _ = torch.ops.aten.unsafe_split.Tensor(x * 2, 2, 1)
    torch._foreach_mul_([first, second], 2.0)
    return first, second


@pytest.mark.parametrize("function", [a_part_of_a_piece, rows_between_others])
def test_other_writes_around_splits_are_left_to_functional_tensors(function: Callable[[Tensor], Any]):
    expected = function(X)
    with compared_ways() as seen:
        made = mg.trace(function)(X)
    assert seen.of
    assert all(map(same_bits, made, expected))
