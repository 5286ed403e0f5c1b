"""Optimizers, scalers, averages, data loaders and objects of the user's own in the state of a graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import monograph as mg
from monograph.internals.internals import internals_of
from tests.checkpoint.continuation import whole
from tests.parity.test_gan import GanStep, Pair, critic, with_generator
from tests.state_dict.test_state_contents import Step, check, inputs
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401
from tests.support.steps import line_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata


@pytest.mark.one_case
@pytest.mark.parametrize("step", [with_generator, critic], ids=lambda f: f.__name__)
def test_two_modules_and_two_optimizers_that_build_steps(step: Callable[..., Any]) -> None:
    graph = check(lambda: GanStep(Pair(), step))
    assert {"maker", "judge", "optimizer.0", "optimizer.1", "scheduler.0"} <= graph.state_dict().keys()


def keeping() -> mg.Graph:
    graph = Step(nn.Linear(4, 4))
    graph.config.keep_gradients()
    return graph


def test_gradients_that_are_kept() -> None:
    graph = check(keeping)
    assert set(graph.state_dict()["graph.gradients"]) == {"model.weight", "model.bias"}


def test_gradients_that_are_loaded_are_copies() -> None:
    graph = keeping()
    graph(inputs()[0])
    saved = graph.state_dict()
    given = saved["graph.gradients"] = {
        path: gradient.clone() for path, gradient in saved["graph.gradients"].items()
    }
    before = {path: gradient.clone() for path, gradient in given.items()}
    graph.load_state_dict(saved)
    for gradient in given.values():
        gradient.zero_()
    assert_same(before, graph.state_dict()["graph.gradients"])


def test_a_gradient_of_another_shape_is_named() -> None:
    graph = keeping()
    graph(inputs()[0])
    saved, before = graph.state_dict(), graph.model.weight.grad.clone()
    saved["graph.gradients"] = saved["graph.gradients"] | {"model.weight": torch.zeros(4)}
    with pytest.raises(mg.CheckpointError, match=r"model.weight is of shape \(4,\); here it is \(4, 4\)"):
        graph.load_state_dict(saved)
    assert torch.equal(graph.model.weight.grad, before)


def test_random_numbers_of_python() -> None:
    def between(graph: mg.Graph) -> None:
        graph.optimizers[0].param_groups[0]["lr"] = random.random()

    def make() -> mg.Graph:
        graph = Step(nn.Linear(4, 4))
        graph.optimizers = [internals_of(graph).registry.optimizers[0].optimizer]
        return graph

    graph = check(make, between=between, python_random=True)
    assert {"python", "numpy"} <= graph.state_dict(python_random=True)["graph.rng"].keys()


# --- scaler and average ------------------------------------------------------------------------------------------------


def scaled() -> mg.Graph:
    graph = Step(nn.Linear(4, 4))
    graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    return graph


def averaged() -> mg.Graph:
    graph = Step(nn.BatchNorm1d(4))
    graph.add_ema(graph.model, lambda updates: min(0.9, updates / (updates + 2)))
    return graph


@pytest.mark.one_case
@pytest.mark.parametrize("make", [scaled, averaged])
def test_scalers_and_averages(make: Callable[[], mg.Graph]) -> None:
    check(make)


# --- optimizers of the user's own ----------------------------------------------------------------------------------


class Precise(torch.optim.Optimizer):
    """Keeps sums of another dtype than the parameters, counts in its param groups, and in an attribute."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for parameter in group["params"]:
                entries = self.state[parameter]
                if not entries:
                    entries["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
                    entries["count"] = torch.zeros((), dtype=torch.int64)
                    entries["number"] = 0
                entries["sum"] += parameter.grad.double() / 3
                entries["count"] += 1
                entries["number"] += 1
                parameter.add_((entries["sum"] / entries["count"]).to(parameter.dtype), alpha=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class PreciseStep(mg.Graph):
    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4).to(torch.bfloat16) if half else nn.Linear(4, 4)
        optimizer = Precise(self.model.parameters())
        optimizer.calls = random.randrange(1000)
        self.add_optimizer(optimizer)

    def build(self, x):
        loss = self.model(x.to(self.model.weight.dtype)).square().mean()
        loss.backward()
        return loss


@pytest.mark.one_case
@pytest.mark.parametrize("half", [False, True])
def test_an_optimizer_keeps_its_dtypes_counters_and_attributes(half: bool) -> None:
    """torch's own `load_state_dict` makes every tensor one of the dtype of its parameter."""
    graph = check(lambda: PreciseStep(half))
    assert graph.state_dict()["optimizer.0"]["state"][0]["sum"].dtype is torch.float64


def test_load_hooks_of_an_optimizer_see_the_loaded_state() -> None:
    first, second = Step(nn.Linear(4, 4)), Step(nn.Linear(4, 4))
    first(inputs()[0])
    optimizer, seen = internals_of(second).registry.optimizers[0].optimizer, []

    def halve(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {
            **state,
            "param_groups": [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]],
        }

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda item: seen.append(item.param_groups[0]["lr"]))
    second.load_state_dict(first.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert seen == [0.005]


class Warming(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's own, with an attribute that its steps make."""

    def get_lr(self) -> list[float]:
        self.rates = [*getattr(self, "rates", []), self.last_epoch]
        return [0.01 / (1 + len(self.rates)) for _ in self.base_lrs]


class Scheduled(mg.Graph):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, kind: type[Warming] = Warming
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=kind(optimizer))

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def test_a_scheduler_of_the_users_own() -> None:
    def make() -> mg.Graph:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Scheduled(model, optimizer)

    check(make)


class Growing(Warming):
    """Its steps change what it holds in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates: list[int] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.rates.append(self.last_epoch)
        return [0.01 / (1 + len(self.rates)) for _ in self.base_lrs]


def test_steps_after_a_load_leave_the_given_state_of_a_scheduler() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Scheduled(model, optimizer, Growing)
    graph(inputs()[0])
    saved = copy.deepcopy(graph.state_dict())
    given = copy.deepcopy(saved)
    graph.load_state_dict(given)
    expected = [graph(x) for x in inputs()]
    assert given["scheduler.0"] == saved["scheduler.0"]
    graph.load_state_dict(given)
    assert_same(expected[:1], [graph(inputs()[0])])


# --- registered objects ------------------------------------------------------------------------------------------------


class Counter:
    """What a user registers: it counts, and keeps a table."""

    def __init__(self) -> None:
        self.count, self.table = 0, {"seen": [0]}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.table = state["table"]


def test_a_registered_object() -> None:
    def make() -> mg.Graph:
        graph = Step(nn.Linear(4, 4))
        graph.counter = Counter()
        graph.register_state("counter", graph.counter)
        return graph

    def between(graph: mg.Graph) -> None:
        graph.counter.count += 1
        graph.counter.table["seen"].append(graph.counter.count)

    check(make, between=between)


class Epoch:
    """A sampler whose state is the number of the epoch, which its generator starts from."""

    def __init__(self) -> None:
        self.epoch, self.generator = 0, torch.Generator()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.generator.manual_seed(self.epoch)


def test_a_load_that_fails_leaves_extra_state_that_another_object_holds() -> None:
    class Outside(nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def get_extra_state(self) -> Any:
            return self.held.tag

        def set_extra_state(self, state: Any) -> None:
            self.held.tag = state

    class Fails:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("it cannot be loaded")

    graph = Step(nn.Sequential(nn.Linear(4, 4), Outside(SimpleNamespace(tag="new"))))
    graph.register_state("fails", Fails())
    saved = graph.state_dict()
    saved["model"]["1._extra_state"] = "old"
    with pytest.raises(mg.CheckpointError, match="it cannot be loaded"):
        graph.load_state_dict(saved)
    assert graph.state_dict()["model"]["1._extra_state"] == "new"


def test_a_load_that_fails_leaves_the_generator_of_a_registered_object_where_it_was() -> None:
    graph, sampler = Step(nn.Linear(4, 4)), Epoch()
    graph.register_state("sampler", sampler)
    torch.rand(3, generator=sampler.generator)
    before = sampler.generator.get_state()
    state = copy.deepcopy(graph.state_dict())
    state["state.sampler"]["epoch"] = 7
    with pytest.raises(mg.CheckpointError, match=r"unexpected: state\.other"):
        graph.load_state_dict({**state, "state.other": 1})
    assert sampler.epoch == 0
    assert torch.equal(sampler.generator.get_state(), before)
    graph.load_state_dict(state)
    assert sampler.epoch == 7


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "item"), [("counter", 3), ("", Counter()), (None, Counter()), ("taken", Counter()), ("x", None)]
)
def test_what_cannot_be_registered(name: Any, item: Any) -> None:
    graph = Step(nn.Linear(4, 4))
    graph.register_state("taken", Counter())
    with pytest.raises(mg.DefinitionError, match="register_state"):
        graph.register_state(name, item)


@pytest.mark.parametrize("item", [torch.Generator(), [1], {"a": 1}])
def test_what_is_saved_in_an_attribute_need_not_be_registered(item: Any) -> None:
    with pytest.raises(mg.DefinitionError, match=r"a (Generator|list|dict) has no state_dict\(\)") as caught:
        Step(nn.Linear(4, 4)).register_state("it", item)
    assert "make it an attribute, graph.it = ...: there generators are saved" in caught.value.hint


def test_registered_modules_optimizers_and_schedulers_are_loaded_with_their_own_checks() -> None:
    graph, other = Step(nn.Linear(4, 4)), Step(nn.Linear(4, 4))
    for item in (graph, other):
        extra = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(extra.parameters(), lr=0.1)
        item.register_state("extra", extra)
        item.register_state("optimizer", optimizer)
        item.register_state("plateau", torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    saved = copy.deepcopy(graph.state_dict())
    other.load_state_dict(saved)
    assert_same({**saved, "graph.about": 0}, {**other.state_dict(), "graph.about": 0})
    del saved["state.extra"]["bias"]
    saved["state.plateau"]["surprise"] = 1
    with pytest.raises(
        mg.CheckpointError, match=r"missing: state.extra.bias\n  unexpected: state.plateau/surprise"
    ):
        other.load_state_dict(saved)


@dataclass
class Numbers(Dataset[torch.Tensor]):
    """Numbers with noise from torch's global generator, if asked for."""

    noise: bool

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 23) + (torch.rand(4) if self.noise else 0)


class Epochs(mg.Graph):
    """With dropout, so that the draws of the loader and of the step come from one generator."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.loader = loader
        self.register_state("loader", loader)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def training(graph: Epochs, epochs: int = 3) -> Iterator[torch.Tensor]:
    """The losses, epoch after epoch, as a script does it."""
    for _ in range(epochs):
        for x in graph.loader:
            yield graph(x).detach()


@pytest.mark.one_case
@pytest.mark.parametrize("own", [False, True], ids=["global", "own_generator"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_data_loader_in_the_middle_of_an_epoch(own: bool, workers: int) -> None:
    def make() -> Epochs:
        generator = torch.Generator().manual_seed(2) if own else None
        data = Numbers(noise=workers == 0)  # a worker has a generator of its own, which no state has
        return Epochs(
            StatefulDataLoader(data, batch_size=5, shuffle=True, generator=generator, num_workers=workers)
        )

    torch.manual_seed(0)
    graph = make()
    losses = training(graph)
    list(islice(losses, 7))  # the third batch of the second epoch is next
    saved = copy.deepcopy(graph.state_dict())
    state = whole(graph)
    expected, end = list(losses), whole(graph)  # to the end of the third: workers go when an epoch is over
    assert len(expected) == 8
    torch.manual_seed(5)
    for other in (graph, make()):
        other.load_state_dict(saved)
        assert_same(state, whole(other))
        assert_same(expected, list(training(other, epochs=2)))
        assert_same(end, whole(other))


def test_a_loader_between_epochs_and_before_the_first() -> None:
    def make() -> Epochs:
        torch.manual_seed(0)
        return Epochs(StatefulDataLoader(Numbers(noise=True), batch_size=5, shuffle=True))

    expected = list(islice(training(make()), 9))
    for steps in (0, 5):
        graph = make()
        list(islice(training(graph), steps))
        saved = copy.deepcopy(graph.state_dict())
        fresh = make()
        torch.manual_seed(9)
        fresh.load_state_dict(saved)
        assert_same(expected[steps:], list(islice(training(fresh), 9 - steps)), f"after {steps}")


class Order:
    """Numbers in an order that is drawn at the beginning of each epoch, from where the epoch was left."""

    def __init__(self, *, reseeds: bool) -> None:
        self.generator, self.reseeds = torch.Generator().manual_seed(5), reseeds
        self.epoch = 0

    def begin(self) -> list[int]:
        if not hasattr(self, "left"):
            self.began, self.left = self.generator.get_state(), 0
        self.numbers = torch.randperm(20, generator=self.generator).tolist()
        return self.numbers[self.left :]

    def end(self) -> None:
        del self.left
        self.epoch += 1
        if self.reseeds:
            self.generator.manual_seed(5 + self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "epoch": self.epoch, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.epoch, self.began = state["left"], state["epoch"], state["began"]
        if self.reseeds:
            self.generator.manual_seed(5 + self.epoch)
        else:
            self.generator.set_state(self.began)


@pytest.mark.parametrize("reseeds", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_generator_that_an_object_sets_when_it_is_loaded_stays_so(epoch: int, reseeds: bool) -> None:
    def make() -> tuple[mg.Graph, Order]:
        graph, order = Step(nn.Linear(4, 4)), Order(reseeds=reseeds)
        graph.register_state("order", order)
        return graph, order

    graph, order = make()
    for _ in range(epoch):
        order.begin()
        order.end()
    numbers = order.begin()
    order.left = 7
    state = copy.deepcopy(graph.state_dict())
    other, resumed = make()  # which has no state_dict() before its first epoch
    other.load_state_dict(state)
    assert resumed.begin() == numbers[7:]
    for item in (order, resumed):
        item.end()
    assert resumed.begin() == order.begin()


def test_a_state_that_an_object_cannot_give_or_take_is_told_with_its_line() -> None:
    class Broken(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["counted"]  # at: broken

    graph = Step(nn.Linear(4, 4))
    graph.register_state("counter", Broken())
    with pytest.raises(mg.CheckpointError, match=r"state\.counter: 'counted' \(KeyError, ") as caught:
        graph.load_state_dict(graph.state_dict())
    assert f"{__file__}:{line_of('broken', __file__)}" in str(caught.value)
