"""Regions of activation checkpointing: `torch.utils.checkpoint` in the user's model, and blocks of a graph."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import monograph as mg
from monograph.block import Block
from monograph.errors import DefinitionError
from monograph.ir.meta import origin
from monograph.recompute.recompute import peak_of
from tests.support import assert_same

COUNT = 5


class Tracked(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, while they live."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.seen = {item.untyped_storage()._cdata: 0 for item in known}
        self.held = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for item in tree_leaves(results):
            if isinstance(item, torch.Tensor):
                self.note(item.untyped_storage())
        return results

    def note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen[key] = nbytes
            self.held += nbytes
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.held -= self.seen.pop(key)


def layer(*, norm: bool, dropout: float = 0.0) -> nn.Module:
    normed = nn.BatchNorm2d(8) if norm else nn.Sigmoid()
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), normed, nn.GELU(), nn.Dropout(dropout), nn.Conv2d(8, 8, 1)
    )


class Net(nn.Module):
    """Layers, each of which is a region if `checkpointed`."""

    def __init__(self, make: Callable[[], nn.Module], *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(COUNT))
        self.head = nn.Linear(8, 4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self.layers:
            x = checkpoint(item, x, use_reentrant=False) if self.checkpointed else item(x)
        return self.head(x.mean((2, 3)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, 16, 16, generator=generator), torch.arange(4)


def made(make: Callable[[], nn.Module], *, checkpointed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(make, checkpointed=checkpointed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def eagerly(
    make: Callable[[], nn.Module], *, checkpointed: bool
) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    (model, optimizer), (x, y) = made(make, checkpointed=checkpointed), batch()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(1)
    losses = [step() for _ in range(3)]
    state = {name: item.clone() for name, item in model.state_dict().items()}
    with Tracked([*model.parameters(), *model.buffers(), x, y]) as tracked:
        step()
    return losses, state, tracked.peak


def captured(
    make: Callable[[], nn.Module], *, checkpointed: bool, blocks: bool = False
) -> tuple[list[torch.Tensor], dict[str, Any], mg.Graph]:
    (model, optimizer), (x, y) = made(make, checkpointed=checkpointed), batch()
    step = mg.train_graph(model, F.cross_entropy, optimizer)
    step.config.backend("aten")
    step.config.enable_straighten_algorithm("SpeedFirst")  # nothing is computed again but what is asked for
    for index in range(COUNT if blocks else 0):
        step.model.layers[index].to(mg.GraphModule).activation_checkpointing = True
    torch.manual_seed(1)
    losses = [step(x, y) for _ in range(3)]
    return losses, dict(model.state_dict()), step


def peak(step: mg.Graph) -> int:
    return peak_of(step.builds[-1].plan.program)


@pytest.mark.parametrize("norm", [False, True])
def test_a_region_of_the_users_frees_what_it_frees_in_eager_mode(norm):
    def make() -> nn.Module:
        return layer(norm=norm)

    losses, state, eager_peak = eagerly(make, checkpointed=True)
    found, after, step = captured(make, checkpointed=True)
    assert_same([losses, state], [found, after])
    whole = peak(captured(make, checkpointed=False)[2])
    assert peak(step) < whole * 2 // 3
    assert peak(step) <= eager_peak * 101 // 100


def test_what_a_region_draws_is_kept_and_the_rest_dropped():
    def make() -> nn.Module:
        return layer(norm=False, dropout=0.3)

    losses, state, _ = eagerly(make, checkpointed=True)
    found, after, step = captured(make, checkpointed=True)
    assert_same([losses, state], [found, after])
    again = [str(node.target) for node in step.builds[0].plan.program.ops() if origin(node).again]
    assert "aten.convolution.default" in again
    assert not any("bernoulli" in item for item in again)
    assert peak(step) < peak(captured(make, checkpointed=False)[2]) * 3 // 4


@pytest.mark.parametrize("norm", [False, True])
def test_a_block_is_a_region_too(norm):
    def make() -> nn.Module:
        return layer(norm=norm)

    losses, state, _ = eagerly(make, checkpointed=False)
    found, after, step = captured(make, checkpointed=False, blocks=True)
    assert_same([losses, state], [found, after])
    assert peak(step) < peak(captured(make, checkpointed=False)[2]) * 2 // 3


def test_a_block_that_is_switched_has_another_build():
    _, _, step = captured(lambda: layer(norm=False), checkpointed=False)
    view = step.model.layers[0].to(mg.GraphModule)
    assert view.activation_checkpointing is False
    view.activation_checkpointing = True
    assert view.activation_checkpointing is True
    assert "checkpointed=[model.layers.0]" in repr(step.config)
    step(*batch())
    assert len(step.builds) == 2
    assert peak(step) < peak_of(step.builds[0].plan.program)
    view.activation_checkpointing = False
    step(*batch())
    assert len(step.builds) == 2
    assert "checkpointed=[]" in repr(step.config)


def test_a_copy_of_a_graph_has_the_blocks_of_its_own():
    _, _, step = captured(lambda: layer(norm=False), checkpointed=False, blocks=True)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        view = other.model.layers[0].to(mg.GraphModule)
        assert view.activation_checkpointing is True
        view.activation_checkpointing = False
        assert step.model.layers[0].to(mg.GraphModule).activation_checkpointing is True


def test_a_block_without_a_graph_cannot_be_switched():
    view = Block("model", nn.Linear(2, 2)).to(mg.GraphModule)
    with pytest.raises(DefinitionError, match="this block belongs to no graph"):
        view.activation_checkpointing = True
    assert view.activation_checkpointing is False


def test_a_budget_drops_more_than_the_regions():
    def make() -> nn.Module:
        return layer(norm=False)

    _, _, step = captured(make, checkpointed=True)
    before = peak(step)
    step.config.set_memory_budget(before * 95 // 100)
    step(*batch())
    assert peak(step) <= before * 95 // 100
