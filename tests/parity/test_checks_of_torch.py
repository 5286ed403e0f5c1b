"""Functions of torch that look at values on their way: the program checks or computes them, as eager does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import monograph as mg
from monograph.testing import align


def test_gaussian_loss_checks_its_variance_in_the_program():
    graph = mg.trace(functional.gaussian_nll_loss)
    x, y, variance = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3)
    align(functional.gaussian_nll_loss, x, y, variance)
    graph(x, y, variance)
    with pytest.raises(RuntimeError, match="a check of values in a function of torch has failed"):
        graph(x, y, -variance)


def test_covariance_checks_its_weights_in_the_program():
    def weighted(x, counts, weights):
        return torch.cov(x, correction=1, fweights=counts, aweights=weights), x.cov(), torch.corrcoef(x)

    x, counts, weights = torch.randn(3, 4), torch.tensor([1, 2, 1, 3]), torch.rand(4)
    align(weighted, x, counts, weights)
    graph = mg.trace(weighted)
    graph(x, counts, weights)
    for bad in ((-counts, weights), (counts, -weights), (counts * 0, weights)):
        with pytest.raises(RuntimeError, match="a check of values"):
            graph(x, *bad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("convert", [list, tuple, torch.tensor])
@pytest.mark.parametrize("concatenated", [False, True])
def test_ctc_loss_with_lengths_of_each_kind(reduction, convert, concatenated):
    log_probs = torch.randn(6, 2, 4).log_softmax(2)
    targets = torch.randint(1, 4, (5,) if concatenated else (2, 3))

    def loss(log_probs, targets, lengths, target_lengths):
        return functional.ctc_loss(log_probs, targets, lengths, target_lengths, reduction=reduction)

    align(loss, log_probs, targets, convert([6, 6]), convert([2, 3]))


def test_least_squares():
    def solved(a, b):
        return torch.linalg.lstsq(a, b, driver="gels")

    align(solved, torch.randn(5, 2), torch.randn(5, 3))


def test_residuals_that_are_not_there_raise():
    graph = mg.trace(lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").residuals * 2)
    a, b = torch.randn(5, 2), torch.randn(5, 3)
    assert graph(a, b).shape == (3,)
    with pytest.raises(RuntimeError, match="invalid for input of size 0"):
        graph(torch.zeros(5, 2), b)


def test_a_split_at_places_in_a_tensor():
    graph, x = mg.trace(torch.tensor_split), torch.randn(5, 2)
    for places in ([1, 3], [2, 4], [1, 3]):
        parts = graph(x, torch.tensor(places))
        assert all(map(torch.equal, parts, x.tensor_split(places)))
    assert len(graph.builds) == 2


def test_a_view_whose_place_an_argument_tells():
    graph, x = mg.trace(lambda x, start: x.narrow(0, start, 2)), torch.randn(5, 2)
    for start in (1, 3, 1):
        assert torch.equal(graph(x, torch.tensor(start)), x[start : start + 2])


def test_a_view_whose_place_the_step_computes_is_refused():
    class Placed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.start = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x, shift):
            return x.narrow(0, (self.start + shift).long(), 2)

    with pytest.raises(mg.DataDependentError):
        mg.trace(Placed())(torch.randn(5, 2), torch.tensor(1.0))
