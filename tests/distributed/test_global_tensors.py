"""A graph on tensors that ranks share trains as eager mode does with DTensors, bit for bit on two ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import monograph as mg
from monograph.distributed import placement, sbp, to_global, to_local
from tests.distributed.training import Case, Wrong, assert_right, local
from tests.support import assert_same

Optimizers = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Net(nn.Module):
    """Parts that eager DTensors know rules for, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.again = nn.LayerNorm(8), nn.Linear(6, 8)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.norm(self.first(x).tanh()))
        return self.again(x)


class Step(mg.Graph):
    """What `work` says, on a model that it may have."""

    def __init__(
        self,
        work: Callable[..., Any],
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.work = work
        if model is not None:
            self.model = model
        if optimizer is not None:
            self.add_optimizer(optimizer)
        self.config.backend("aten")

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return self.work(*args, **kwargs)


def mesh() -> Any:
    return init_device_mesh("cpu", (2,))


def batch(rank: int, index: int = 0, rows: int = 4) -> DTensor:
    """The rows of both ranks, each of which makes its own."""
    generator = torch.Generator().manual_seed(2 * index + rank)
    return DTensor.from_local(torch.randn(rows, 6, generator=generator), mesh(), [Shard(0)])


def copies(model: nn.Module, **dims: int) -> nn.Module:
    """A copy of a model with DTensors: weights of modules of these names in parts, anything else as copies."""
    model = copy.deepcopy(model)
    known: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in known:
                is_part = path in dims and name == "weight"
                kind = Shard(dims[path]) if is_part else Replicate()
                known[id(parameter)] = nn.Parameter(distribute_tensor(parameter.detach(), mesh(), [kind]))
            setattr(module, name, known[id(parameter)])
    return model


def _train(
    rank: int,
    optimizer: Optimizers,
    lay_out: Callable[[nn.Module], nn.Module] = copies,
    *,
    clip: bool = False,
    amp: bool = False,
    backend: str = "aten",
) -> None:
    torch.manual_seed(0)
    base = Net()
    models = [lay_out(base) for _ in range(2)]
    optimizers = [optimizer(model.parameters()) for model in models]

    def forward(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = model(x)
            loss = y.square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss, y

    step = Step(partial(forward, models[1]), models[1], optimizers[1])
    step.config.backend(backend)
    for index in range(3):
        x = batch(rank, index)
        optimizers[0].zero_grad()
        expected = forward(models[0], x)
        optimizers[0].step()
        found = step(x)
        for there, here in zip(expected, found, strict=True):
            assert (there.placements, there.shape) == (here.placements, here.shape)
            assert here.requires_grad
            assert_same(local(there), local(here))
        assert_same(
            [*map(local, models[0].parameters())], [*map(local, models[1].parameters())], f"step {index}"
        )
        states = [
            [local(item) for entries in opt.state.values() for item in entries.values()] for opt in optimizers
        ]
        assert_same(*states)
    assert len(step.builds) == 1
    with pytest.raises(mg.GraphBoundaryError, match="in a backward"):
        found[0].backward()


def _accumulate(rank: int) -> None:
    torch.manual_seed(0)
    base = Net()
    models = [copies(base) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]

    def forward(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x)
        loss = y.square().mean()
        loss.backward()
        return loss, y

    ours = [
        Step(partial(forward, model), model, opt)
        for model, opt in zip(models[1:], optimizers[1:], strict=True)
    ]
    for step in ours:
        step.config.set_gradient_accumulation_steps(2)
    for index in range(2):
        x = batch(rank, index)
        optimizers[0].zero_grad()
        losses, results = [], []
        for part in to_local(x).chunk(2):
            y = models[0](DTensor.from_local(part, mesh(), [Shard(0)]))
            loss = y.square().mean()
            (loss / 2).backward()
            losses.append(loss.detach())
            results.append(local(y))
        optimizers[0].step()
        for run in (ours[0], ours[1].eager):
            loss, y = run(x)
            assert (loss.shape, y.shape, y.placements) == ((2,), (8, 8), (Shard(0),))
            assert_same([item.full_tensor() for item in losses], [*loss.detach().full_tensor()])
            assert_same(torch.cat(results), local(y))
        for model in models[1:]:
            assert_same([*map(local, models[0].parameters())], [*map(local, model.parameters())])
    uneven = to_global(torch.ones(3 - rank, 6), placement.all("cpu"), sbp.split(0))
    with pytest.raises(mg.SignatureError, match=r"has 5 rows on 2 processes: they cannot be split into 2"):
        ours[0](uneven)


def _kept_gradients(rank: int) -> None:
    """Those that a graph without an optimizer adds to, and those of a step."""
    torch.manual_seed(0)
    base = nn.Linear(6, 2)

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    for trains in (False, True):
        models = [copies(base) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        step = Step(partial(backward, models[1]), models[1], optimizers[1] if trains else None)
        step.config.keep_gradients()
        for index in range(3):
            backward(models[0], batch(rank, index))
            step(batch(rank, index))
            for there, here in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert there.grad.placements == here.grad.placements
                assert_same(local(there.grad), local(here.grad), f"{trains} {index}")
            if trains:
                optimizers[0].step()
                optimizers[0].zero_grad()


def _by_words(rank: int) -> None:
    """Layouts that build() asks for, and those of what it makes itself."""
    every = placement.all("cpu")
    words = (sbp.split(0), sbp.split(1), sbp.broadcast, sbp.partial_sum)

    def work(x: torch.Tensor, here: torch.Tensor) -> list[torch.Tensor]:
        moved = [to_global(x * 2, every, word) for word in words]
        made = [to_global(here + 1, every, word) for word in words]
        return [*moved, *made, x.sum(), to_global(x.sum(), sbp=sbp.broadcast), to_local(x) * 3]

    x, here = batch(rank), torch.full((2, 2), float(rank))
    step = Step(work)
    for expected, found in zip(work(x, here), step(x, here), strict=True):
        if isinstance(expected, DTensor):
            assert (expected.placements, expected.shape) == (found.placements, found.shape)
        assert_same(local(expected), local(found))
    assert step.verify(x, here).ok
    one, other = placement("cpu", [0]), placement("cpu", [1])
    crossing = Step(lambda x: to_global(x * 2, other, sbp.broadcast) + 1)
    y = crossing(to_global(torch.ones(2, 3), one, sbp.broadcast))
    assert (placement.of(y.device_mesh), y.shape) == (other, (2, 3))
    assert to_local(y).tolist() == ([[3.0] * 3] * 2 if rank else [])


def _arguments(rank: int) -> None:
    x, free = batch(rank), batch(rank, 7)
    nested = Step(lambda pair, *, more: {"sum": [pair["a"] + more[0]], "same": pair["a"]})
    found = nested({"a": x}, more=(free,))
    assert_same(local(x + free), local(found["sum"][0]))
    assert_same(local(x), local(found["same"]))
    changed = copy.deepcopy(x)
    Step(lambda x: x.add_(1))(changed)
    assert_same(local(x) + 1, local(changed))
    closed = Step(lambda x: x + free)
    for _ in range(2):
        assert_same(local(x + free), local(closed(x)))
        free.add_(1)
    redistributed = x.redistribute(placements=[Replicate()])  # its part may be on its way
    assert_same(local(x.full_tensor()) * 2, local(Step(lambda x: x * 2)(redistributed)))


def _builds(rank: int) -> None:
    step = Step(lambda x: x * 2)
    batches = [
        batch(rank),
        batch(rank),
        batch(rank, rows=6),
        batch(rank).redistribute(placements=[Replicate()]),
        torch.ones(4, 6),
    ]
    for x in batches:
        assert_same(local(x) * 2, local(step(x)))
    form = r"a DTensor \(8, 6\) {} on a mesh \(2,\) of cpu"
    assert len(step.builds) == 4
    for build, said in zip(
        step.builds[1:],
        (
            r"is a DTensor \(12, 6\) .* built for " + form.format(r"S\(0\)"),
            f"is {form.format('R')}",
            r"is a single value \(a tensor, .*\); the graph was built for a DTensor",
        ),
        strict=True,
    ):
        assert re.search(said, str(build.reason)), build.reason
    first = Step(lambda x: x * 2)
    first.compile(batch(rank))
    assert ".to_local()  f32[4, 6]" in first.show()


def _refused(rank: int) -> None:
    model, plain = copies(Net()), Net()
    other = placement("cpu", [[0], [1]])
    elsewhere = to_global(torch.ones(2, 6), other, (sbp.split(0), sbp.broadcast))
    before = [local(item).clone() for item in model.parameters()]
    cases: list[tuple[mg.Graph, Any, type[mg.MonographError], str]] = [
        (
            Step(model, model),
            torch.ones(2, 6),
            mg.DistributedError,
            "processes share and one of this process",
        ),
        (Step(plain, plain), batch(rank), mg.DistributedError, "processes share and one of this process"),
        (Step(model, model), elsewhere, mg.DistributedError, "tensors of several meshes"),
        (Step(model, model), batch(rank).requires_grad_(), mg.SignatureError, "a DTensor that requires grad"),
    ]
    for step, x, kind, said in cases:
        with pytest.raises(kind, match=said):
            step(x)
    zero = Step(lambda x: plain(x).sum().backward(), plain, torch.optim.SGD(plain.parameters(), 0.1))
    zero.config.enable_zero(stage=3)
    with pytest.raises(mg.DistributedError, match="processes share and one of this process") as caught:
        zero(batch(rank))
    assert "x.to_local()" in caught.value.hint
    with pytest.raises(mg.SignatureError, match=r"is a DTensor: many\(\)"):
        Step(model, model).many(DTensor.from_local(torch.ones(3, 2, 6), mesh(), [Shard(1)]))
    assert_same(before, [*map(local, model.parameters())])


def _zero(rank: int, stage: int) -> None:
    """Copies are laid out by rows, and train as copies do."""
    torch.manual_seed(0)
    base = Net()
    models = [copies(base) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step = Step(partial(forward, models[1]), models[1], optimizers[1])
    step.config.enable_zero(stage=stage, shard_min_size=16)
    for index in range(3):
        optimizers[0].zero_grad()
        expected = forward(models[0], batch(rank, index))
        optimizers[0].step()
        torch.testing.assert_close(
            expected.detach().full_tensor(), step(batch(rank, index)).detach().full_tensor()
        )
    assert models[1].first.weight.placements == (Shard(0),)
    assert models[1].first.weight is models[1].again.weight
    assert models[1].first.bias.placements == (Replicate(),)
    assert optimizers[1].state[models[1].last.weight]["exp_avg"].placements == (Shard(0),)
    for there, here in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(there.detach().full_tensor(), here.detach().full_tensor())


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **options)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _ranks_in_another_order(rank: int) -> None:
    """The first part is that of the first rank which the placement names; so in eager mode, and so in a graph."""
    whole = torch.arange(24.0).reshape(4, 6)
    there, here = placement("cpu", ranks=[1, 0]), placement("cpu", ranks=[0, 1])
    shared = to_global(whole, there, sbp.broadcast)

    def moved(x: torch.Tensor) -> Any:
        parts = to_global(x, sbp=sbp.split(0))
        return parts, to_global(parts, sbp=sbp.broadcast), to_global(parts, here, sbp.split(1))

    for parts, again, columns in (moved(shared), Step(moved)(shared)):
        assert_same(whole[:2] if rank == 1 else whole[2:], to_local(parts))
        assert_same(whole, to_local(again))
        assert_same(whole[:, 3 * rank : 3 * rank + 3], to_local(columns))


QUICK: dict[str, Case] = {
    "ranks in another order": _ranks_in_another_order,
    "adamw": partial(_train, optimizer=_adamw),
    "adamw fused": partial(_train, optimizer=partial(_adamw, fused=True)),
    "sgd clipped": partial(_train, optimizer=_sgd, clip=True),
    "autocast": partial(_train, optimizer=_sgd, amp=True),
    "columns and rows": partial(
        _train, optimizer=_adamw, lay_out=partial(copies, first=0, last=1), clip=True
    ),
    "exact": partial(_train, optimizer=_adamw, backend="exact"),
    "accumulation": _accumulate,
    "kept gradients": _kept_gradients,
    "by words": _by_words,
    "arguments": _arguments,
    "builds": _builds,
    "refused": _refused,
    "zero 1": partial(_zero, stage=1),
    "zero 3": partial(_zero, stage=3),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_global_tensors(case: str, quick: Wrong) -> None:
    assert_right(case, quick)
