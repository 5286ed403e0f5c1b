"""The judge itself: what it calls equal, and what it names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monograph.numerics.comparison import Compared, is_fine
from monograph.numerics.judge import against_float64, differences, same_bits


@pytest.mark.every_case
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_minus_zero_is_not_zero(dtype):
    assert not same_bits(torch.tensor(0.0, dtype=dtype), torch.tensor(-0.0, dtype=dtype))


def test_nan_equals_nan():
    assert same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))


def test_dtype_and_shape_count():
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_plain_numbers_are_compared_as_bits_too():
    assert not list(differences({"lr": 0.1, "nan": math.nan}, {"lr": 0.1, "nan": math.nan}))
    assert [d.path for d in differences({"lr": 0.0}, {"lr": -0.0})] == ["lr"]
    assert [d.path for d in differences({"lr": 1}, {"lr": 1.0})] == ["lr"]


def test_arrays_are_compared_as_bits_too():
    given, nan = np.array([0.0, 1.0]), np.array([math.nan])
    assert not list(differences({"a": given, "nan": nan}, {"a": given.copy(), "nan": nan.copy()}))
    for other in (-given, given + 1, given.astype(np.float32), given.reshape(1, 2), [0.0, 1.0]):
        assert [d.path for d in differences({"a": given}, {"a": other})] == ["a"]


def test_views_that_promise_conjugation_or_negation_are_compared_by_value():
    a = torch.randn(3, dtype=torch.complex64)
    assert same_bits(a.conj(), a.conj().resolve_conj())
    assert not same_bits(a.conj(), a)
    assert same_bits(a.conj().imag, -a.imag)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_compared_by_their_parts(convert):
    a = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert same_bits(convert(a), convert(a.clone()))
    assert not same_bits(convert(a), convert(a.t()))
    assert not same_bits(convert(a), convert(-a))
    assert not same_bits(convert(a), a)


def test_layout_does_not_count():
    a = torch.randn(3, 4)
    assert same_bits(a, a.t().contiguous().t())


@given(st.integers(0, 23), st.booleans())
def test_the_first_differing_element_is_named(position, as_complex):
    expected = torch.randn(2, 3, 4, dtype=torch.complex64 if as_complex else torch.float32)
    got = expected.clone()
    got.view(-1)[position:] += 1
    found = list(differences({"w": expected}, {"w": got}))
    assert len(found) == 1
    assert found[0].path == "w"
    assert found[0].index == tuple(int(i) for i in torch.unravel_index(torch.tensor(position), (2, 3, 4)))


def test_missing_entries_and_plain_values_are_named():
    found = {d.path: str(d) for d in differences({"a": 1, "b": [1, 2.0]}, {"b": [1, 3.0], "c": 0})}
    assert set(found) == {"a", "b[1]", "c"}
    assert "expected 2.0, got 3.0" in found["b[1]"]


def test_distance_to_float64_accepts_eager_and_refuses_worse():
    torch.manual_seed(0)
    exact = torch.randn(100, dtype=torch.float64)
    eager = exact.float()
    assert against_float64({"w": exact}, {"w": eager}, {"w": eager}).ok
    noisy = eager * (1 + 1e-5)
    report = against_float64({"w": exact}, {"w": eager}, {"w": noisy})
    assert not report.ok
    assert report.graph_rms > 2 * report.eager_rms


def test_one_bad_tensor_is_not_hidden_by_good_ones():
    exact = {"a": torch.ones(100_000, dtype=torch.float64) / 3, "b": torch.ones(1, dtype=torch.float64)}
    eager = {path: tensor.float() for path, tensor in exact.items()}
    graph = {"a": eager["a"], "b": eager["b"] + 1e-5}
    report = against_float64(exact, eager, graph)
    assert [d.path for d in report.distances if not d.ok] == ["b"]
    assert not report.ok


def test_a_nan_out_of_nowhere_is_refused():
    exact = {"w": torch.ones(3, dtype=torch.float64)}
    eager = {"w": torch.ones(3)}
    assert not against_float64(exact, eager, {"w": torch.tensor([1.0, math.nan, 1.0])}).ok


def test_an_overflow_of_eagers_excuses_nothing_else():
    """In its own type; the graph may overflow there as well, or be right."""
    exact = {"w": torch.tensor([1e6, 2.0, 3.0], dtype=torch.float64)}
    eager = {"w": torch.tensor([math.inf, 2.0, 3.0], dtype=torch.float16)}
    for first, second, good in (
        (math.inf, 2.0, True),
        (math.inf, 2.5, False),
        (math.inf, math.nan, False),
        (math.nan, 2.0, False),
        (-math.inf, 2.0, False),
    ):
        graph = {"w": torch.tensor([first, second, 3.0], dtype=torch.float16)}
        assert against_float64(exact, eager, graph).ok == good
    assert against_float64(exact, eager, {"w": torch.tensor([1e6, 2.0, 3.0])}).ok


def test_one_rounding_is_granted_where_eager_happens_to_be_exact():
    exact = {"p": torch.full((1000,), 1.0 + 2**-25, dtype=torch.float64)}
    eager = {"p": torch.ones(1000)}  # errs by a quarter of a unit in the last place
    unit = torch.finfo(torch.float32).eps
    assert against_float64(
        {"p": torch.ones(3).double()}, {"p": torch.ones(3)}, {"p": torch.ones(3) - unit / 2}
    ).ok
    assert against_float64(exact, eager, {"p": torch.ones(1000)}).ok
    assert not against_float64(exact, eager, {"p": torch.ones(1000) + 3 * unit}).ok


def test_a_step_near_a_kink_may_go_as_far_as_its_neighbours():
    """Eager mode and most neighbours stay on one side; the graph and one neighbour are on the other."""
    exact = {"p": torch.ones(1000).double()}
    eager = {"p": torch.ones(1000) + torch.finfo(torch.float32).eps}
    graph = {"p": torch.ones(1000) + 1e-3}
    beyond = {"p": torch.ones(1000) + 3e-3}
    nearby = [exact, {"p": exact["p"] - 1.2e-3}]
    report = against_float64(exact, eager, graph, nearby)
    assert report.moved_rms == pytest.approx(1.2e-3)
    assert (report.ok, report.ok_for_one_step) == (False, True)
    assert not against_float64(exact, eager, graph, nearby[:1]).ok_for_one_step
    assert not against_float64(exact, eager, beyond, nearby).ok_for_one_step


def test_what_the_last_place_of_weights_moves_is_granted_to_single_tensors_only():
    exact = {"p": torch.ones(100_000).double(), "q": torch.zeros(2).double()}
    eager = {path: tensor.float() for path, tensor in exact.items()}
    nearby = [{**exact, "q": torch.tensor([0.0, 1e-7]).double()}, exact]
    graph = {**eager, "q": torch.tensor([9e-7, 0.0])}
    assert not against_float64(exact, eager, graph).ok
    assert against_float64(exact, eager, graph, nearby).ok
    assert not against_float64(exact, eager, {**graph, "q": torch.tensor([1.1e-6, 0.0])}, nearby).ok
    everywhere = [{path: tensor + 1e-5 for path, tensor in exact.items()}]
    assert not against_float64(exact, eager, {**eager, "p": eager["p"] + 1e-5}, everywhere).ok


def test_a_bad_verdict_is_bad_although_the_rest_has_eagers_bits():
    exact, eager = {"p": torch.ones(3).double()}, {"p": torch.ones(3)}
    rest = Compared(0, "outputs", "result", None)
    good, bad = (against_float64(exact, eager, {"p": torch.ones(3) + by}) for by in (0, 1e-2))
    assert is_fine([rest], {"parameters": good})
    assert not is_fine([rest], {"outputs": good, "parameters": bad})
