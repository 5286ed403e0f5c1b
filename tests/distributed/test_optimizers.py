"""Optimizers on parts: those that fully_shard runs have its bits at every stage of ZeRO, others keep whole parameters and state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import debug
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from tests.distributed import test_sharded, test_zero
from tests.distributed.training import Case, Wrong, assert_right
from tests.support import assert_same

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "Adadelta": ({},),
    "Adafactor": ({},),
    "Adagrad": ({},),
    "Adam": ({}, {"amsgrad": True}),
    "AdamW": ({},),
    "Adamax": ({},),
    "ASGD": ({},),
    "Muon": ({},),
    "NAdam": ({},),
    "RAdam": ({},),
    "RMSprop": ({}, {"centered": True, "momentum": 0.9}),
    "Rprop": ({},),
    "SGD": ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}),
}
_NEVER = {"LBFGS", "SparseAdam"}  # a graph refuses them
_WAYS: tuple[dict[str, bool], ...] = ({}, {"foreach": False}, {"foreach": True}, {"fused": True})


def _make(parameters: Iterable[Any], name: str, **options: Any) -> torch.optim.Optimizer:
    chosen = [item for item in parameters if name != "Muon" or item.dim() == 2]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(chosen, **options)
    return made


def _all() -> dict[str, Make]:
    found: dict[str, Make] = {}
    for name, several in _OPTIONS.items():
        taken = inspect.signature(getattr(torch.optim, name)).parameters
        for options in several:
            for way in _WAYS:
                if way.keys() <= taken.keys():
                    given = {**options, **way}
                    about = " ".join(f"{key}={value}" for key, value in given.items())
                    found[f"{name} {about}".strip()] = partial(_make, name=name, **given)
    return found


TORCHS = _all()


class Eager:
    """A net of test_zero that eager mode trains: by fully_shard if it runs the optimizer, else by DistributedDataParallel."""

    def __init__(self, base: nn.Module, make: Make) -> None:
        plain = copy.deepcopy(base)
        self.model: nn.Module = fully_shard(copy.deepcopy(base))
        self.optimizer = make(self.model.parameters())
        self.in_parts = True
        try:
            trial = fully_shard(copy.deepcopy(base))
            _step(trial, make(trial.parameters()), torch.ones(4, 6))
        except (RuntimeError, NotImplementedError):
            self.in_parts = False
            self.model = DistributedDataParallel(plain)
            self.optimizer = make(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return _step(self.model, self.optimizer, x)

    def parameters(self) -> list[torch.Tensor]:
        return [test_zero.whole(item) for item in self.model.parameters()]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def same_as_eager(rank: int, stage: int, make: Make, exact: bool = True) -> mg.Graph:
    """Whole parameters are compared, and that state is in parts if eager mode has it so."""
    torch.manual_seed(0)
    base = test_zero.Net()
    eager = Eager(base, make)
    graph = test_zero.NetStep(base, make(base.parameters()), stage)
    batches = torch.Generator().manual_seed(7 + rank)
    for index in range(3):
        x = torch.randn(4, 6, generator=batches)
        assert_same(eager.step(x), graph(x).detach(), f"loss {index}")
        got = [test_zero.whole(item) for item in base.parameters()]
        if exact or eager.in_parts:
            assert_same(eager.parameters(), got, f"step {index}")
        torch.testing.assert_close(eager.parameters(), got)
    says = "keeps its parameters and its state whole" in str(graph.explain())
    assert says == (not eager.in_parts and not _is_fused(make)), graph.explain()
    return graph


def _is_fused(make: Any) -> bool:
    return bool(make.keywords.get("fused"))


def later_state(rank: int, stage: int) -> None:
    """State that begins with a gradient is made by the first step, in parts, and the second one finds it."""
    graph = same_as_eager(rank, stage, partial(_make, name="SGD", lr=0.1, momentum=0.9, dampening=0.1))
    assert len(graph.builds) == 2, graph.explain()


def numbers_move(rank: int, stage: int) -> None:
    """Builds do not depend on what DTensor knows already, or does not."""
    debug._clear_sharding_prop_cache()
    graph = same_as_eager(rank, stage, partial(_make, name="RAdam"))
    assert len(graph.builds) == 1, graph.explain()


def two_kinds(rank: int, stage: int) -> None:
    """One optimizer has parts and one whole parameters; the norm of all gradients clips both, and averages have both."""

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [item for item in model.parameters() if item.dim() == 2]
        return [
            torch.optim.Rprop(matrices),
            torch.optim.AdamW([item for item in model.parameters() if item.dim() == 1], lr=0.01),
        ]

    class Two(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = base
            for item in optimizers(base):
                self.add_optimizer(item)
            self.set_grad_scaler(scalers[1])
            self.add_ema(base, 0.9)
            self.config.backend("aten")
            self.config.enable_zero(stage=stage, shard_min_size=4)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            return loss

    torch.manual_seed(rank)
    base = test_zero.Net()
    eager = DistributedDataParallel(copy.deepcopy(base))
    theirs = optimizers(eager)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    graph = Two()
    batches = torch.Generator().manual_seed(7 + rank)
    mean: list[torch.Tensor] = []
    for _ in range(3):
        x = torch.randn(4, 6, generator=batches)
        eager.zero_grad()
        scalers[0].scale(eager(x).square().mean()).backward()
        for item in theirs:
            scalers[0].unscale_(item)
        nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        for item in theirs:
            scalers[0].step(item)
        scalers[0].update()
        present = [item.detach().clone() for item in eager.parameters()]
        mean = [old.lerp(new, 1 - 0.9) for old, new in zip(mean, present, strict=True)] if mean else present
        graph(x)
        torch.testing.assert_close(present, [test_zero.whole(item) for item in base.parameters()])
    with graph.ema_weights():
        torch.testing.assert_close(mean, [test_zero.whole(item) for item in base.parameters()])
    assert len(graph.builds) == 1, graph.explain()


class Slow(torch.optim.Optimizer):
    """Follows its parameters slowly: state begins with their values, and is nested."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is None:
                    continue
                state = self.state[item]
                if not state:
                    state["slow"] = item.detach().clone()
                    state["more"] = {"count": 0, "sums": [torch.zeros_like(item)]}
                state["more"]["count"] += 1
                state["more"]["sums"][0].add_(item.grad)
                item.sub_(state["more"]["sums"][0], alpha=group["lr"] / state["more"]["count"])
                state["slow"].lerp_(item, 0.5)
                item.copy_(state["slow"])


def own_optimizer(rank: int, stage: int) -> None:
    """First state that follows from a parameter is found without a step, and without asking other ranks."""
    graph = same_as_eager(rank, stage, Slow)
    assert len(graph.builds) == 1, graph.explain()


def refused(rank: int) -> None:
    """What eager mode cannot run on such parameters, a graph refuses, on each rank with the same words."""
    for name, words in (("Rprop", "index_put_"), ("Muon", "add_")):
        sides = test_sharded.Sides(rank, partial(_make, name=name))
        with pytest.raises(mg.OptimizerError, match=rf"{name}\) does not run on parameters .*{words}"):
            test_sharded.NetStep(sides)(sides.batch())


CHECKS = (later_state, numbers_move, two_kinds, own_optimizer)
QUICK: dict[str, Case] = {
    **{
        f"{check.__name__} at stage {stage}": partial(check, stage=stage)
        for check in CHECKS
        for stage in (1, 3)
    },
    **{
        f"{name} at stage {stage}": partial(same_as_eager, stage=stage, make=TORCHS[name])
        for name in ("Rprop", "Adafactor", "Muon")
        for stage in (1, 2, 3)
    },
    "refused": refused,
}


def on_shards(rank: int, make: Make) -> None:
    """Parameters of fully_shard, clipped; what eager mode refuses is refused."""
    torch.manual_seed(0)
    trial = test_sharded.sharded(rank, test_sharded.Net())
    optimizer = make(trial.parameters())
    trial(torch.ones(4, 5)).sum().backward()
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        if not _is_fused(make):
            sides = test_sharded.Sides(rank, make)
            with pytest.raises(mg.OptimizerError, match="does not run on parameters that are DTensors"):
                test_sharded.NetStep(sides)(sides.batch())
        return
    first_is_apart = "dampening" in getattr(make, "keywords", {})
    test_sharded.trained(rank, make, builds=1 + first_is_apart)


LONG: dict[str, Case] = {
    **{f"{name} on shards": partial(on_shards, make=make) for name, make in TORCHS.items()},
    **{
        f"{name} at stage {stage}": partial(
            # torch's kernel for lists has other bits for the last elements, of which parts have others
            same_as_eager,
            stage=stage,
            make=make,
            exact=not ("SGD" in name and _is_fused(make)),
        )
        for name, make in TORCHS.items()
        for stage in (1, 2, 3)
    },
}


def test_the_table_has_all_of_torch() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert kinds == {*_OPTIONS, *_NEVER}


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", QUICK)
def test_optimizers_do_as_in_eager_mode(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("case", LONG)
def test_each_way_of_each_optimizer(case: str, long: Wrong) -> None:
    assert_right(case, long)
