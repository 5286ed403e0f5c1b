"""What OneFlow's tests of graphs over several processes ask for, on two ranks, by its words."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import monograph.flow as flow
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same

BROADCAST, SPLIT, COLUMNS = flow.sbp.broadcast, flow.sbp.split(0), flow.sbp.split(1)


class Graph(flow.nn.Graph):
    """A module, which is trained with an optimizer."""

    def __init__(self, module: nn.Module, optimizer: Any = None) -> None:
        super().__init__()
        self.module = module
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, *args: Any) -> Any:
        made = self.module(*args)
        if self.config.training:
            made.backward()
        return made


class Product(nn.Module):
    """A product whose result all ranks have."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = flow.matmul(x, y.T)
        return (z.to_global(sbp=BROADCAST) if z.is_global else z).relu()


def whole(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both() -> Any:
    return flow.placement("cpu", ranks=np.arange(2))


def shared(x: torch.Tensor, sbp: Any) -> torch.Tensor:
    """A tensor that both ranks have, cut as `sbp` says."""
    return x.to_global(placement=both(), sbp=BROADCAST).to_global(sbp=sbp)


def close(expected: torch.Tensor, found: torch.Tensor) -> None:
    torch.testing.assert_close(expected.detach(), torch.from_numpy(found.numpy()), rtol=1e-4, atol=1e-6)


def _products(rank: int) -> None:
    """Layouts of two factors, one graph each: all give the same."""
    x, y = whole(0, 2, 6), whole(1, 3, 6)
    for of_x, of_y in ((BROADCAST, BROADCAST), (SPLIT, BROADCAST), (COLUMNS, COLUMNS), (BROADCAST, SPLIT)):
        found = Graph(Product())(shared(x, of_x), shared(y, of_y))
        assert found.is_global
        assert found.sbp == (BROADCAST,)
        torch.testing.assert_close(flow.matmul(x, y.T).relu(), found.to_local())


def _weight_as_split(rank: int) -> None:
    class Weighted(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.weight.to_global(grad_sbp=BROADCAST)
            return flow.matmul(y, x.T).relu().sum().to_global(sbp=BROADCAST)

    x, weight = whole(0, 2, 6), whole(1, 3, 6)
    module = Weighted(shared(weight, BROADCAST))
    found = Graph(module, flow.optim.SGD(module.parameters(), lr=1.0))(shared(x, SPLIT))
    plain = weight.clone().requires_grad_()
    loss = flow.matmul(plain, x.T).relu().sum()
    loss.backward()
    assert found.sbp[0] == BROADCAST
    torch.testing.assert_close(loss.detach(), found.to_local())
    torch.testing.assert_close(weight - plain.grad, module.weight.to_local().detach())


def _made_inside(rank: int) -> None:
    """A graph makes a shared tensor, of another type, and one on more ranks."""

    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            ones = flow.ones((3, 6), dtype=flow.float32, placement=both(), sbp=BROADCAST)
            return flow.matmul(x, ones.T), x.to(dtype=flow.float64)

    x = shared(whole(0, 4, 6), SPLIT)
    for expected, found in zip(Made()(x), Graph(Made())(x), strict=True):
        assert (found.sbp, found.dtype) == ((SPLIT,), expected.dtype)
        assert_same(expected.to_local(), found.to_local())
    mine = flow.ones((2, 3)) if rank == 0 else flow.empty(())
    on_one = mine.to_global(placement=flow.placement("cpu", ranks=[0]), sbp=BROADCAST)
    assert on_one.shape == (2, 3)

    class Moved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_global(placement=both())

    found = Graph(Moved())(on_one)
    assert (found.placement, found.sbp) == (both(), (BROADCAST,))
    assert found.to_local().numpy().mean() == 1.0


class Stages(nn.Module):
    """Two layers on ranks of their own, and the value sent from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.places = [flow.placement("cpu", {0: [rank]}) for rank in range(2)]
        self.layers = nn.ModuleList(nn.Linear(3, 3, False) for _ in range(2))
        for number, (layer, place) in enumerate(zip(self.layers, self.places, strict=True)):
            layer.to_global(placement=place, sbp=[BROADCAST])
            flow.nn.init.constant_(layer.weight, 1.5 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x.to_global(placement=place, sbp=[BROADCAST]))
        return x


def _ends_elsewhere(rank: int) -> None:
    """The result is on the last rank alone; elsewhere it is empty."""
    graph, x = Graph(Stages().eval()), whole(0, 5, 3)
    for _ in range(3):
        found = graph(x.to_global(placement=flow.placement("cpu", {0: [0]}), sbp=[BROADCAST]))
    assert found.placement == flow.placement("cpu", [1])
    if rank == 0:
        assert found.to_local().numel() == 0
    else:
        expected = x @ torch.full((3, 3), 1.5) @ torch.full((3, 3), 2.5)
        torch.testing.assert_close(expected, found.to_local())
    assert len(graph.builds) == 1


class Loss(nn.Module):
    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last = map(nn.Parameter, weights)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = flow.nn.functional.gelu(flow.matmul(x, self.first.T))
        return (flow.matmul(x, self.last) - target).square().mean()


def _clipped(rank: int, of_x: Any, of_weights: Any, norm_type: float, steps: int = 1) -> None:
    """Param groups that clip, on copies with a split batch, and on split weights: as one process."""

    def optimizer(module: nn.Module) -> Any:
        options = {"clip_grad_max_norm": 0.1, "clip_grad_norm_type": norm_type}
        return flow.optim.SGD([{"params": list(module.parameters()), "lr": 1.0, "momentum": 0.5, **options}])

    x, target = whole(0, 8, 10), whole(3, 8, 10)
    weights = whole(1, 8, 10), whole(2, 8, 10)
    modules = Loss(*weights), Loss(*(shared(item, of_weights) for item in weights))
    graphs = [Graph(module, optimizer(module)) for module in modules]
    for graph in graphs:
        graph.config.set_gradient_accumulation_steps(steps)
    for _ in range(2):
        expected = graphs[0](x, target)
        found = graphs[1](shared(x, of_x), shared(target, of_x))
        close(expected.mean(), found.to_global(sbp=BROADCAST).mean())
    for there, here in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        close(there, here)


def _zero(rank: int, stage: int) -> None:
    """Copies are split over the ranks from the first step on; graphs that evaluate see them whole."""
    first, last = flow.nn.Linear(8, 6, bias=False), flow.nn.Linear(6, 4, bias=False)
    plain = [nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)]
    for number, module in enumerate((first, last, *plain)):
        flow.nn.init.constant_(module.weight, 0.5 + number % 2)
    first = first.to_global(placement=both(), sbp=BROADCAST)
    last.weight = nn.Parameter(shared(last.weight.detach(), SPLIT))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).to_global(placement=both(), sbp=BROADCAST)).sum()

    module = Net()
    optimizer = flow.optim.SGD(
        [{"params": first.parameters()}, {"params": last.parameters()}], lr=0.001, momentum=0.9
    )
    train, evaluate = Graph(module, optimizer), Graph(module)
    train.set_grad_scaler(flow.amp.StaticGradScaler(200))
    train.config.enable_zero(True, stage=stage, shard_min_size=1, shard_restore_level=1)
    x = flow.randint(1, 9, (6, 8), dtype=flow.float32, placement=both(), sbp=SPLIT)
    there = torch.optim.SGD([item.weight for item in plain], lr=0.001, momentum=0.9)
    full = x.full_tensor()
    for _ in range(2):
        there.zero_grad()
        loss = plain[1](plain[0](full)).sum()
        loss.backward()
        there.step()
        close(loss, train(x))
    assert (first.weight.sbp, last.weight.sbp) == ((SPLIT,), (SPLIT,))
    close(plain[1](plain[0](full)).sum(), evaluate(x))
    for expected, found in zip(plain, (first, last), strict=True):
        close(expected.weight, found.weight)


def _saved_and_loaded(rank: int, folder: str) -> None:
    """A state of shared tensors, saved by one rank or by both, loaded into another graph: the next steps are the same."""

    def made() -> tuple[Graph, nn.Module]:
        linear = flow.nn.Linear(3, 8)
        flow.nn.init.constant_(linear.weight, 0.5)
        flow.nn.init.constant_(linear.bias, 0.25)
        linear.to_global(placement=both(), sbp=BROADCAST)

        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x).sum()

        module = Sum()
        return Graph(module, flow.optim.SGD(linear.parameters(), lr=0.001, momentum=0.9)), linear

    x = shared(whole(0, 8, 3), SPLIT)
    graph, linear = made()
    assert set(graph.state_dict())  # before it is compiled
    for _ in range(2):
        graph(x)
    state = graph.state_dict()
    assert state["module.linear.weight-momentum"].is_global
    one = flow.placement("cpu", ranks=[0])
    alone = flow.to_local(flow.to_global(state, placement=one, sbp=BROADCAST))
    if rank in one.ranks:
        flow.save(alone, f"{folder}/alone")
    flow.save(state, f"{folder}/first", global_dst_rank=0)
    flow.save(state, f"{folder}/both")
    dist.barrier()
    graph(x)
    for name in ("alone", "first", "both"):
        other, its_linear = made()
        loaded = flow.load(f"{folder}/{name}") if name != "alone" or rank == 0 else None
        if name == "alone":
            loaded = flow.to_global(loaded, placement=one, sbp=BROADCAST)
        other.load_state_dict(loaded)
        assert other.state_dict()["System-Train-TrainStep"].item() == 2
        other(x)
        assert other.state_dict()["System-Train-TrainStep"].item() == 3
        assert_same(linear.weight.to_local().detach(), its_linear.weight.to_local().detach(), name)
        assert_same(linear.bias.to_local().detach(), its_linear.bias.to_local().detach(), name)


def _many_sums(rank: int) -> None:
    """Collectives of many layers become few."""
    model = nn.Sequential(*(flow.nn.Linear(4, 4) for _ in range(6)))
    model.to_global(placement=both(), sbp=BROADCAST)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).mean()

    module = Mean()
    graph = Graph(module, flow.optim.SGD(module.parameters(), lr=0.1))
    flow.boxing.nccl.set_fusion_threshold_mbytes(800)
    flow.boxing.nccl.set_fusion_max_ops_num(10)
    graph(shared(whole(0, 4, 4), SPLIT))
    assert graph.show().count("all_reduce.default(") == 1


def in_folder(case: Any, rank: int) -> None:
    """Run a case with a folder that both ranks see."""
    found = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(found, 0)
    case(rank, found[0])
    assert Path(found[0]).exists()


QUICK: dict[str, Case] = {
    "products": _products,
    "weight as split": _weight_as_split,
    "made inside": _made_inside,
    "ends elsewhere": _ends_elsewhere,
    "clipped copies": partial(_clipped, of_x=SPLIT, of_weights=BROADCAST, norm_type=2.0),
    "clipped copies by the largest": partial(
        _clipped, of_x=SPLIT, of_weights=BROADCAST, norm_type=float("inf")
    ),
    "clipped parts": partial(_clipped, of_x=BROADCAST, of_weights=SPLIT, norm_type=2.0),
    "clipped in micro-batches": partial(_clipped, of_x=SPLIT, of_weights=BROADCAST, norm_type=2.0, steps=4),
    "zero 1": partial(_zero, stage=1),
    "zero 2": partial(_zero, stage=2),
    "saved and loaded": partial(in_folder, _saved_and_loaded),
    "many sums": _many_sums,
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_oneflow_graphs(case: str, quick: Wrong) -> None:
    assert_right(case, quick)
