"""Functions and modules that only OneFlow has equal their formulas in NumPy, eagerly and through a Graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monograph.flow as flow
import monograph.flow.nn as nn
import monograph.flow.nn.functional as F
from monograph.errors import DefinitionError, SignatureError
from tests.support import assert_same

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(3, 4))
INDICES = np.array([[0, 2], [1, 1], [3, 0]])
CORNERS = np.array([[0, 1], [2, 3], [0, 1]])


def both(function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives, which a graph of it gives too."""
    given = [flow.tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args]

    class Call(nn.Graph):
        def build(self, *args):
            return function(*args)

    eager = function(*given)
    assert_same(eager, Call()(*given))
    return eager


def check(expected: Any, got: torch.Tensor) -> None:
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-12, atol=1e-15)


def test_reading_at_coordinates() -> None:
    check(X[CORNERS[:, 0], CORNERS[:, 1]], both(flow.gather_nd, X, CORNERS))
    check(X[[2, 0]], both(flow.gather_nd, X, np.array([[2], [0]])))
    rows = np.stack([X[b, INDICES[b]] for b in range(3)])
    check(rows, both(flow.batch_gather, X, INDICES))
    deep = RANDOM.normal(size=(3, 4, 2))
    check(np.stack([deep[b, INDICES[b]] for b in range(3)]), both(flow.batch_gather, deep, INDICES))


def test_writing_at_coordinates() -> None:
    updates = np.array([1.0, 2.0, 5.0])
    expected = np.zeros((3, 4))
    for (row, column), value in zip(CORNERS, updates, strict=True):
        expected[row, column] += value
    check(expected, both(flow.scatter_nd, CORNERS, updates, (3, 4)))
    changed = X.copy()
    changed[[0, 2], [1, 3]] = [1.0, 2.0]
    tensor = flow.tensor(X)
    check(changed, both(flow.tensor_scatter_nd_update, tensor, CORNERS[:2], updates[:2]))
    check(X, tensor)


def test_slices() -> None:
    check(X[:, 1:4:2], both(flow.slice, X, [None, (1, 4, 2)]))
    expected = X.copy()
    expected[0:2, 1:3] = 7.0
    tensor = flow.tensor(X)
    returned = flow.slice_update(tensor, flow.full((2, 2), 7.0, dtype=flow.float64), [(0, 2, 1), (1, 3, 1)])
    check(expected, tensor)
    assert returned is tensor
    part = flow.slice(tensor, [(0, 1, 1)])
    part.zero_()
    check(expected, tensor)


def test_shapes_and_dtypes() -> None:
    row = np.array([1.0, 2.0, 3.0])
    check(np.repeat(row[:, None], 4, 1), both(flow.broadcast_like, row, X, [1]))
    check(np.broadcast_to(X[:1], X.shape), both(flow.broadcast_like, X[:1].copy(), X))
    assert both(lambda x: flow.cast(x, flow.int32), X).dtype is flow.int32
    assert flow.convert_oneflow_dtype_to_numpy_dtype(flow.float16) is np.float16
    assert flow.convert_oneflow_dtype_to_numpy_dtype(flow.bool) is np.bool_
    with pytest.raises(SignatureError, match="NumPy has no bfloat16"):
        flow.convert_oneflow_dtype_to_numpy_dtype(flow.bfloat16)
    assert flow.int8 in flow.dtypes()
    assert flow.utils.tensor.from_torch(t := torch.ones(2)) is flow.utils.tensor.to_torch(t) is t


def test_top_k_and_the_area_under_the_curve() -> None:
    scores = RANDOM.normal(size=(6, 5))
    targets = RANDOM.integers(0, 5, 6)
    ranks = [(scores[i] > scores[i, targets[i]]).sum() for i in range(6)]
    for k in (1, 2, 4):
        assert both(flow.in_top_k, targets, scores, k).tolist() == [rank < k for rank in ranks]

    truth, values = np.array([1, 0, 1, 1, 0, 0, 1]), np.array([0.9, 0.4, 0.4, 0.7, 0.7, 0.1, 0.2])
    pairs = [(a, b) for a in values[truth == 1] for b in values[truth == 0]]
    area = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])
    got = both(flow.roc_auc_score, truth, values)
    assert got.shape == (1,)
    np.testing.assert_allclose(got.numpy(), [area], rtol=1e-6)


def test_losses_and_activations() -> None:
    check(X / (1 + np.exp(-1.702 * X)), both(flow.quick_gelu, X))
    check(X / (1 + np.exp(-1.702 * X)), both(nn.QuickGELU(), X))
    labels = np.array([0, 3, 1])
    expected = np.log(np.exp(X).sum(1)) - X[np.arange(3), labels]
    check(expected, both(F.sparse_softmax_cross_entropy, labels, X))
    assert F.depend(x := flow.tensor(X), flow.ones(1)) is x


@pytest.mark.parametrize("merge", [True, False])
def test_greedy_decoding(merge: bool) -> None:
    steps, count, classes = 8, 5, 4
    scores = RANDOM.normal(size=(steps, count, classes))
    lengths = np.array([8, 5, 1, 8, 3])
    decoded, score = both(lambda s, n: F.ctc_greedy_decoder(s, n, merge), scores, lengths)
    for sample in range(count):
        path = scores[: lengths[sample], sample].argmax(1)
        kept = [
            symbol
            for i, symbol in enumerate(path)
            if symbol != classes - 1 and not (merge and i and path[i - 1] == symbol)
        ]
        assert decoded[sample].tolist() == kept + [0] * (steps - len(kept))
        best = scores[: lengths[sample], sample].max(1).sum()
        np.testing.assert_allclose(score[sample].item(), -best, rtol=1e-12)


@pytest.mark.parametrize(("kind", "dims"), [(1, 2), (2, 4), (3, 5)])
def test_fused_normalisation(kind: int, dims: int) -> None:
    shape = (4, 3, 2, 2, 2)[:dims]
    x, addend = RANDOM.normal(size=shape), RANDOM.normal(size=shape)
    module = getattr(nn, f"FusedBatchNorm{kind}d")(3).double()
    axes = tuple(axis for axis in range(dims) if axis != 1)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    normal = (x - mean) / np.sqrt(var + 1e-5)
    check(np.maximum(normal, 0), module(flow.tensor(x)))
    check(np.maximum(normal + addend, 0), module(flow.tensor(x), flow.tensor(addend)))
    assert module.num_batches_tracked == 2


def test_root_mean_square_normalisation() -> None:
    module = nn.RMSLayerNorm(4).double()
    with flow.no_grad():
        module.weight.copy_(flow.tensor([1.0, 2.0, 3.0, 4.0]))
    check(X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-6) * [1, 2, 3, 4], module(flow.tensor(X)))


@pytest.mark.parametrize("skip", [False, True])
def test_a_stack_of_layers(skip: bool) -> None:
    module = nn.FusedMLP(4, [5, 6], 2, skip_final_activation=skip).double()
    assert [name for name, _ in module.named_parameters()] == [
        f"{kind}_{i}" for i in range(3) for kind in ("weight", "bias")
    ]
    values = X
    for i in range(3):
        weight, bias = (getattr(module, f"{kind}_{i}").detach().numpy() for kind in ("weight", "bias"))
        values = values @ weight.T + bias
        values = values if skip and i == 2 else np.maximum(values, 0)
    check(values, module(flow.tensor(X)))
    with pytest.raises(DefinitionError, match="1 dropout rates for 2 hidden layers"):
        nn.FusedMLP(4, [5, 6], 2, hidden_dropout_rate=[0.1])


def test_dropout_in_a_stack_of_layers() -> None:
    module = nn.FusedMLP(
        4, [50], 40, hidden_dropout_rate=[0.0], out_dropout_rate=0.5, skip_final_activation=True
    )
    assert (module(flow.ones(20, 4)) == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (module.eval()(flow.ones(20, 4)) == 0).sum() == 0


@pytest.mark.parametrize("margins", [(1.0, 0.0, 0.35), (1.0, 0.5, 0.0), (1.1, 0.2, 0.1)])
def test_margins(margins: tuple[float, float, float]) -> None:
    cosines = np.tanh(X)
    labels = np.array([2, 0, 3])
    expected = cosines.copy()
    rows = np.arange(3)
    m1, m2, m3 = margins
    expected[rows, labels] = np.cos(m1 * np.arccos(cosines[rows, labels]) + m2) - m3
    check(expected, both(nn.CombinedMarginLoss(*margins), cosines, labels))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "args"),
    [("gelu", ()), ("silu", ()), ("mish", ()), ("softsign", ()), ("softshrink", (0.1,)), ("pad", ((1, 2),))],
)
def test_what_torch_has_elsewhere(name: str, args: tuple[Any, ...]) -> None:
    x = flow.tensor(X)
    assert_same(getattr(torch.nn.functional, name)(x, *args), getattr(flow, name)(x, *args))


def test_methods_as_functions() -> None:
    x = flow.tensor(X)
    assert flow.view(x, 12).shape == (12,)
    assert flow.repeat(x, 2, 1).shape == (6, 4)
    assert_same(x.masked_fill(x > 0, 0.0), flow.masked_fill_(x.clone(), x > 0, 0.0))
    assert flow.new_full(x, (2,), 3.0).tolist() == [3.0, 3.0]
