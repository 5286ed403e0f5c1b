"""Lists of half types that are multiplied in place: eager's kernels round the number to the type first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


def trained(dtype: torch.dtype, name: str, backend: str) -> list[torch.Tensor]:
    """Weights and optimizer state after some steps, in plain PyTorch without a backend."""
    source = torch.Generator().manual_seed(0)
    model = nn.ParameterList(
        [torch.randn(size, generator=source).to(dtype) for size in ((37,), (5, 3), (1,))]
    )
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=True)

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.stack([(item * x).square().sum() for item in self.model]).sum()
            loss.backward()
            return loss

    step = Step()
    if backend:
        step.config.backend(backend)
    for _ in range(4):
        x = torch.randn((), generator=source).to(dtype)
        if backend:
            step(x)
        else:
            optimizer.zero_grad()
            type(step).build.__wrapped__(step, x)
            optimizer.step()
    states = [item for known in optimizer.state.values() for item in known.values()]
    return [item.detach().clone() for item in (*model.parameters(), *states)]


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "Adadelta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_on_lists_of_half_types_have_eagers_bits(dtype: torch.dtype, name: str) -> None:
    assert_same(trained(dtype, name, ""), trained(dtype, name, "aten"))


def test_numbers_of_their_own() -> None:
    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = x.clone(), x + 1
        torch._foreach_mul_([one, other], [0.9, 0.77])
        return one, other, torch.ops.aten.mul_.Scalar(x.clone(), 0.9)

    x = torch.linspace(-1, 1, 301, dtype=torch.bfloat16)
    assert_same(scaled(x), mg.trace(scaled)(x))
