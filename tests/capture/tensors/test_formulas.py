"""Gradients for which torch takes another formula in a trace, and which are those of eager mode all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support import assert_same

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MASK = torch.tensor([True, False, True])
PRODUCTS: dict[str, Use] = {
    "all": lambda x, v: x.prod(),
    "dim": lambda x, v: torch.prod(x, 1),
    "kept dim": lambda x, v: x.prod(dim=0, keepdim=True),
    "dtype": lambda x, v: x.prod(-1, dtype=torch.float64),
    "no dims": lambda x, v: x[0, 0].prod(),
}
FILLS: dict[str, Use] = {
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v[0]),
    "masked_fill, broadcast": lambda x, v: torch.masked_fill(x, x[:, :1] > 0, v[1]),
    "index_fill": lambda x, v: x.index_fill(1, torch.tensor([0, 3, 0]), v[0]),
    "index_put": lambda x, v: torch.index_put(x, (MASK,), v[:2, None].expand(2, 4)),
    "index_put, broadcast": lambda x, v: x.index_put((MASK,), v[:4], accumulate=True),
    "index_put, positions": lambda x, v: x.index_put((torch.tensor([1, 1]),), v[:4]),
}


def gradients(use: Use) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    def step(x: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> Any:
        x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
        result = use(x, value)
        weighted = (result * slope[: result.numel()].view(result.shape)).sum()
        return result.detach(), torch.autograd.grad(weighted, (x, value), allow_unused=True)

    return step


def numbers(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factors of later steps are zero in one place, in two of one row, in two rows."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(3, 4, generator=generator)
    for row, column in ((), ((1, 2),), ((1, 2), (1, 0)), ((1, 2), (0, 1)))[index]:
        x[row, column] = 0.0
    return x, torch.randn(5, generator=generator), torch.randn(12, generator=generator)


@pytest.mark.parametrize("name", [*PRODUCTS, *FILLS])
def test_the_gradient_is_that_of_eager(name: str) -> None:
    step = gradients({**PRODUCTS, **FILLS}[name])
    graph = mg.trace(step)
    for index in range(4):
        assert_same(step(*numbers(index)), graph(*numbers(index)), f"step {index}")
    assert len(graph.builds) == 1


@pytest.mark.parametrize("name", ["all", "dim", "masked_fill"])
def test_a_gradient_of_the_gradient_is_right(name: str) -> None:
    def step(x: torch.Tensor, value: torch.Tensor, _: torch.Tensor) -> Any:
        x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
        result = {**PRODUCTS, **FILLS}[name](x, value).square().sum()
        slopes = torch.autograd.grad(result, (x, value), create_graph=True, allow_unused=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes if s is not None), x)[0]

    graph = mg.trace(step)
    for index in range(2):
        torch.testing.assert_close(graph(*numbers(index)), step(*numbers(index)), rtol=1e-4, atol=1e-5)


def test_a_size_that_depends_on_data_stays_refused_where_it_is_asked_for() -> None:
    def step(x: torch.Tensor, value: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(FILLS["index_fill"](x, value * 2).sum(), value, create_graph=True)
        return slope

    with pytest.raises(mg.DataDependentError):
        mg.trace(lambda x: x.unique())(torch.randn(3))
    assert mg.trace(step)(*numbers(0)).shape == (5,)


def test_transforms_see_torchs_own_functions() -> None:
    x = torch.randn(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.grad(lambda row: row.prod()))(x)

    torch.testing.assert_close(mg.trace(step)(x), step(x))
