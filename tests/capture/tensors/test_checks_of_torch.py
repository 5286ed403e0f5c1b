"""Functions of torch that look at values on their way: the program checks or computes them, as eager does."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.nn import functional

import monograph as mg
from monograph.testing import align

CHECKED = {
    "variance": (lambda x, v: functional.gaussian_nll_loss(x, x * 2, v), torch.rand(4, 3), -torch.rand(4, 3)),
    "class too high": (lambda x, c: functional.one_hot(c, 3) + x, torch.tensor([0, 1, 2, 0]), torch.tensor([0, 3, 0, 0])),
    "class too low": (lambda x, c: functional.one_hot(c, 3) + x, torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, -1])),
    "quantile": (lambda x, q: x.quantile(q, dim=0), torch.tensor(0.5), torch.tensor(1.5)),
    "quantiles": (lambda x, q: torch.nanquantile(x, q=q), torch.tensor([0.5, 1.0]), torch.tensor([0.5, -1.0])),
    "no quantile": (torch.quantile, torch.tensor(0.5), torch.tensor(float("nan"))),
    "standard deviation": (lambda x, s: torch.normal(x, s), torch.ones(4, 3), -torch.ones(4, 3)),
}  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize("name", CHECKED)
def test_wrong_values_are_eagers_errors(name):
    function, good, bad = CHECKED[name]
    x = torch.randn(4, 3)
    align(function, x, good)
    graph = mg.trace(function)
    graph(x, good)
    with pytest.raises(Exception) as eager:  # noqa: PT011  # which one is what eager mode says
        function(x, bad)
    with pytest.raises(type(eager.value)) as raised:
        graph(x, bad)
    assert type(raised.value) is type(eager.value)
    assert str(raised.value) == str(eager.value)
    assert any(__file__ in note for note in raised.value.__notes__)
    assert len(graph.builds) == 1


def test_distributions_raise_for_wrong_parameters_and_values():
    def likely(deviation, value):
        return Normal(0.0, deviation, validate_args=True).log_prob(value)

    graph, good = mg.trace(likely), torch.ones(3)
    assert torch.equal(graph(good, good), likely(good, good))
    for wrong in ((-good, good), (good, good * float("nan"))):
        with pytest.raises(ValueError, match="Expected"):
            likely(*wrong)
        with pytest.raises(ValueError, match=r"Expected .* but found invalid values"):
            graph(*wrong)


def test_distributions_check_batches_of_any_size():
    def likely(logits, actions):
        chosen = Categorical(logits=logits, validate_args=True)  # which Dynamo turns off for a whole process
        return chosen.log_prob(actions), chosen.entropy()

    graph = mg.trace(likely)
    for rows in (5, 7, 9, 11):
        logits, actions = torch.randn(rows, 3), torch.randint(3, (rows,))
        assert all(map(torch.equal, graph(logits, actions), likely(logits, actions)))
    assert len(graph.builds) == 2
    with pytest.raises(ValueError, match="Expected") as eager:
        likely(logits, actions + 3)
    with pytest.raises(ValueError, match="Expected") as raised:
        graph(logits, actions + 3)
    assert "to be within the support (IntegerInterval(lower_bound=0, upper_bound=2))" in str(eager.value)
    assert "to be within the support (IntegerInterval(lower_bound=0, upper_bound=2))" in str(raised.value)


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
