"""What eager mode refuses for the dtypes of its tensors, the capture refuses: no step begins that must fail in the middle."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import monograph as mg

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 2), X.double()),
    "integers": (lambda: nn.Linear(4, 2), X.long()),
    "half": (lambda: nn.Linear(4, 2), X.bfloat16()),
    "transposed convolution": (lambda: nn.ConvTranspose1d(1, 2, 3), X[:, None].double()),
    "layer norm": (lambda: nn.LayerNorm(4), X.double()),
    "batch norm": (lambda: nn.BatchNorm1d(4), X.double()),
    "group norm": (lambda: nn.GroupNorm(2, 4), X.double()),
}
MIXED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "layer norm": (lambda: nn.LayerNorm(4), X.bfloat16()),
    "batch norm": (lambda: nn.BatchNorm1d(4), X.bfloat16()),
}


class Step(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().square().mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("name", REFUSED)
def test_mixed_dtypes_are_refused_and_training_goes_on(name: str) -> None:
    make, x = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    with pytest.raises(RuntimeError):
        model(x)
    good = x.float()
    step = Step(model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(mg.CaptureError, match="and takes one dtype") as error:
        step(x)
    assert "convert the arguments" in str(error.value)
    assert "self.model(x)" in linecache.getline(__file__, error.value.where.line)
    assert all(map(torch.equal, before, model.parameters()))
    expected = model(good).square().mean()
    assert torch.equal(step(good), expected)


@pytest.mark.parametrize("name", MIXED)
def test_norms_take_halves_beside_their_statistics(name: str) -> None:
    make, x = MIXED[name]
    torch.manual_seed(0)
    model = make()
    expected = model(x).float().square().mean()
    assert torch.equal(Step(model)(x), expected)
