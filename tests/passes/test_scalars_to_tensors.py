"""Numbers as tensors keep the types of results."""

from __future__ import annotations

import pytest
import torch

import monograph as mg
from monograph.passes.inductor.scalars_to_tensors import scalars_to_tensors
from monograph.passes.run import Stage, run_passes
from tests.support import same_bits

FORMULAS = {
    "times": lambda x, n: x * n,
    "plus": lambda x, n: x + n,
    "plus a multiple": lambda x, n: torch.add(x, n, alpha=3),
    "minus": lambda x, n: n - x,
    "through": lambda x, n: x / n,
    "power": lambda x, n: x**n,
    "base": lambda x, n: n**x,
    "compared": lambda x, n: x < n,
}


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("name", FORMULAS)
def test_beside_tensors_of_any_dimension(name, shape, dtype):
    formula, x = FORMULAS[name], torch.full(shape, 0.7, dtype=dtype)
    graph = mg.trace(lambda x, n: formula(x, n))
    graph.compile(x, 1.3)
    (_, after) = run_passes(Stage("plan", graph.builds[0].program, 0.0), (scalars_to_tensors,))
    (got,) = after.program.module(x, torch.tensor(1.3, dtype=torch.float64))
    expected = formula(x, 1.3)
    assert got.dtype == expected.dtype
    if dtype is torch.float32:
        assert same_bits(expected, got)
    torch.testing.assert_close(got, expected)  # half types round the number too
