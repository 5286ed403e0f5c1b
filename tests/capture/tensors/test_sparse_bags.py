"""Sparse gradients of the tables of `nn.EmbeddingBag`, and sparse tensors of which a graph does not know the parts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import monograph as mg

COUNTS = (6, 6, 4, 7)  # bags in a batch


def batches(*, weights: bool) -> list[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(1)
    made = [torch.randint(10, (count, 3), generator=random) for count in COUNTS]
    return [(ids, torch.rand(ids.shape, generator=random)) if weights else (ids,) for ids in made]


def bag(mode: str, **options: object) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(10, 4, mode=mode, **{"sparse": True, **options})  # type: ignore[arg-type]


class Step(mg.Graph):
    def __init__(self, model: nn.EmbeddingBag, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        loss = self.model(ids, per_sample_weights=weights).sin().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    ("mode", "weights"), [("sum", False), ("mean", False), ("sum", True)], ids=["sum", "mean", "weighted"]
)
def test_tables_are_trained_as_in_eager_mode(mode: str, weights: bool, sparse: bool) -> None:
    model = bag(mode, sparse=sparse)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for ids, *rest in batches(weights=weights):
        optimizer.zero_grad()
        loss = model(ids, per_sample_weights=rest[0] if rest else None).sin().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    own = bag(mode, sparse=sparse)
    step = Step(own, torch.optim.SGD(own.parameters(), lr=0.1))
    step.config.backend("aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = [step(*batch) for batch in batches(weights=weights)]
    assert all(map(torch.equal, ours, losses))
    assert torch.equal(own.weight, model.weight)


def test_padding_is_named() -> None:
    model = bag("sum", padding_idx=0)
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    with pytest.raises(mg.DataDependentError, match="padding_idx") as caught:
        step(torch.randint(10, (6, 3)))
    assert "sparse=False" in str(caught.value)
    assert torch.equal(model.weight, before)


def test_a_sparse_tensor_of_which_a_graph_does_not_know_the_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an op that PyTorch gets later may make it: its parts would be constants without values."""
    monkeypatch.setattr("monograph.capture.tensors.sparse.ops.BAG_GRADIENT", None)
    model = bag("sum")
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.CaptureError, match="does not know of which parts") as caught:
        step(torch.randint(10, (6, 3)))
    assert "sparse=False" in str(caught.value)
