"""What belongs to the state of a graph besides a module and its optimizer, each continued without a break."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.checkpoint.continuation import whole
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401

Run = Callable[[], list[Any]]


def inputs(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


class Step(mg.Graph):
    """A module whose output is trained to be small."""

    def __init__(self, model: nn.Module, **attributes: Any) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for name, value in attributes.items():
            setattr(self, name, value)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def detached(result: Any) -> Any:
    return (
        result.detach().clone() if isinstance(result, torch.Tensor) else [detached(item) for item in result]
    )


def check(make: Callable[[], mg.Graph], *, python_random: bool = False, between: Any = None) -> mg.Graph:
    """Three steps, a state, three more; then these again in the same graph, a fresh one, and one that ran on."""
    data = inputs()

    def go_on(graph: mg.Graph) -> Any:
        losses = []
        for x in data[3:]:
            losses.append(detached(graph(x)))
            if between is not None:
                between(graph)
        return losses, whole(graph, python_random=python_random)

    torch.manual_seed(3)
    random.seed(3)
    graph = make()
    for x in data[:3]:
        graph(x)
    saved = copy.deepcopy(graph.state_dict(python_random=python_random))
    start = whole(graph, python_random=python_random)
    expected = go_on(graph)
    num_builds = len(graph.builds)
    graph.load_state_dict(saved)
    assert_same(expected, go_on(graph), "the same graph")
    assert len(graph.builds) == num_builds, graph.explain()
    torch.manual_seed(4)
    random.seed(4)
    fresh, trained = make(), make()
    for x in data[::-1]:
        trained(x)
    for name, other in {"fresh": fresh, "trained": trained}.items():
        other.load_state_dict(saved)
        assert_same(start, whole(other, python_random=python_random), f"{name}, loaded")
        assert_same(expected, go_on(other), name)
    return graph


# --- modules -----------------------------------------------------------------------------------------------------------


class Module(nn.Module):
    """A linear layer and a function of it; `start` makes what else the module holds."""

    def __init__(self, start: Callable[[Any], None], function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.layer(x))


def nothing(_module: Any) -> None: ...


def average_buffer(module: Any) -> None:
    module.register_buffer("mean", torch.zeros(4), persistent=False)


def move_mean(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.mean = module.mean * 0.9 + y.detach().mean(0)
    return y + module.mean


def attribute(module: Any) -> None:
    module.hidden = torch.zeros(5, 4)


def no_attribute(module: Any) -> None:
    module.hidden = None


def recur(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.hidden = torch.tanh(y.detach() + (0.0 if module.hidden is None else module.hidden))
    return y + module.hidden


def pair(module: Any) -> None:
    module.hidden = (torch.zeros(5, 4), torch.zeros(5, 4))


def recur_in_pairs(module: Any, y: torch.Tensor) -> torch.Tensor:
    h, c = module.hidden if module.hidden is not None else (torch.zeros(5, 4), torch.zeros(5, 4))
    module.hidden = (torch.tanh(h + y).detach(), (c + h).detach())
    return y + module.hidden[0] * module.hidden[1]


def memory(module: Any) -> None:
    module.memory = {"last": [torch.zeros(5, 4)], "count": 2}


def remember(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.memory["last"][0] = (y + module.memory["last"][0]).detach()
    return y * module.memory["last"][0]


def late(module: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "cache"):
        module.cache = torch.zeros(5, 4)
    module.cache = module.cache * 0.5 + y.detach()
    return y + module.cache


def not_ready(module: Any) -> None:
    module.ready = False


def settle(module: Any, y: torch.Tensor) -> torch.Tensor:
    """The first step takes a scale from its data, the others use it."""
    if not module.ready:
        module.scale = y.detach().std()
        module.ready = True
    return y * module.scale


def one_at_two_places(module: Any) -> None:
    module.h = module.c = torch.zeros(5, 4)


def add_in_place(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.h.add_(y.detach())
    return y + module.c


def part(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.c = module.c + y.detach()
    module.h = y.detach().tanh()
    return y + module.c + module.h


def change_in_place(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.memory["last"][0].mul_(0.5).add_(y.detach())
    return y + module.memory["last"][0]


ATTRIBUTES = {
    "buffer": (average_buffer, move_mean),
    "attribute": (attribute, recur),
    "attribute_made_late": (no_attribute, recur),
    "attribute_not_there": (nothing, late),
    "pair": (pair, recur_in_pairs),
    "pair_made_late": (no_attribute, recur_in_pairs),
    "nested": (memory, remember),
    "changed_in_place": (memory, change_in_place),
    "one_at_two_places": (one_at_two_places, add_in_place),
    "parted": (one_at_two_places, part),
    "plain_value": (not_ready, settle),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_tensors_that_no_state_dict_holds(name: str) -> None:
    graph = check(lambda: Step(Module(*ATTRIBUTES[name])))
    assert "graph.tensors" in graph.state_dict()


def test_they_are_in_the_state_before_the_first_step_too() -> None:
    graph = Step(Module(attribute, recur))
    start = copy.deepcopy(graph.state_dict())
    losses = [graph(x) for x in inputs()]
    graph.load_state_dict(start)
    assert_same(losses, [graph(x) for x in inputs()])


def test_what_no_state_dict_can_take_back_is_missing() -> None:
    graph = Step(Module(no_attribute, recur))
    start = copy.deepcopy(graph.state_dict())
    graph(inputs()[0])
    with pytest.raises(mg.CheckpointError, match=r"missing: graph.tensors/model.hidden"):
        graph.load_state_dict(start)


class Remembering(Step):
    def build(self, x):
        self.memory[0] = torch.tanh(self.memory[0] + x).detach()
        loss = self.model(x + self.memory[0]).square().mean()
        loss.backward()
        return loss


def test_lists_of_the_graph_itself() -> None:
    graph = check(lambda: Remembering(nn.Linear(4, 4), memory=[torch.zeros(5, 4)]))
    assert list(graph.state_dict()["graph.tensors"]) == ["graph.memory"]


class Logging(Step):
    def build(self, x):
        self.recent.append(self.recent[-1] * 0.5)
        del self.recent[0]
        loss = self.model(x).square().mean() * self.recent[-1]
        loss.backward()
        self.log["loss"].append(loss.item())
        self.log["steps"].append(1)
        self.shapes.append(tuple(x.shape))
        return loss


def test_lists_and_dicts_of_numbers() -> None:
    graph = check(
        lambda: Logging(nn.Linear(4, 4), recent=[1.0, 2.0], log={"loss": [], "steps": []}, shapes=[])
    )
    state = graph.state_dict()["graph.tensors"]
    assert [len(state["graph.log"][name]) for name in ("loss", "steps")] == [6, 6]
    assert state["graph.recent"] == graph.recent
    assert state["graph.shapes"] == [(5, 4)] * 6


class Named(dict[str, Any]):
    pass


@pytest.mark.parametrize("item", [Named(a=1), [Named(a=1)], [torch.strided], [{1, 2}], {Named: 1}])
def test_what_no_checkpoint_holds_is_no_part_of_a_state(item: Any, tmp_path: Path) -> None:
    graph = Step(nn.Linear(4, 4), item=item)
    assert graph.state_dict().get("graph.tensors") is None
    mg.save(graph.state_dict(), tmp_path / "first")


def test_a_state_of_before_the_first_step_empties_lists_of_numbers() -> None:
    graph = Logging(nn.Linear(4, 4), recent=[1.0, 2.0], log={"loss": [], "steps": []}, shapes=[])
    start = copy.deepcopy(graph.state_dict())
    losses = [graph(x) for x in inputs()]
    graph.load_state_dict(start)
    assert (graph.recent, graph.log) == ([1.0, 2.0], {"loss": [], "steps": []})
    assert_same(losses, [graph(x) for x in inputs()])


class Box:
    def __init__(self) -> None:
        self.hidden = torch.zeros(5, 4)


class Boxed(Step):
    def build(self, x):
        self.box.hidden = torch.tanh(self.box.hidden + x).detach()
        loss = self.model(x + self.box.hidden).square().mean()
        loss.backward()
        return loss


def test_what_a_state_cannot_hold_is_told() -> None:
    graph = Boxed(nn.Linear(4, 4), box=Box())
    graph(inputs()[0])
    with pytest.warns(
        UserWarning, match=r"a step changes graph\.box\.hidden, for which the state has no place"
    ):
        graph.state_dict()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def without_bias(_module: Any, state: Any, prefix: str, *_: Any) -> None:
    del state[f"{prefix}layer.bias"]


class Counting(nn.Module):
    """With extra state, and hooks at saving and loading."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.history: list[int] = []
        self.register_state_dict_post_hook(without_bias)
        self.register_load_state_dict_pre_hook(self.fill)
        self.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())

    def fill(self, _module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}layer.bias"] = state[f"{prefix}layer.weight"][0] * 2

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history[:] = state["history"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))


def normed() -> nn.Module:
    """Its `weight` shows the memory of `weight_orig` until the first step."""
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4)))


@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("model", [Tied, lazy, normed], ids=["tied", "lazy", "spectral_norm"])
def test_modules(model: Callable[[], nn.Module]) -> None:
    check(lambda: Step(model()))


def test_extra_state_and_hooks_are_the_modules_own() -> None:
    graph, fresh = Step(Counting()), Step(Counting())
    graph(inputs()[0])
    graph.model.to(nn.Module).history.append(7)
    fresh.load_state_dict(copy.deepcopy(graph.state_dict()))
    layer = fresh.model.to(nn.Module).layer
    assert_same(layer.bias.detach(), layer.weight.detach()[0] * 2)
    assert fresh.model.to(nn.Module).history == [7]


class Generators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.rand(5, 4, generator=self.generator)


class Drawing(Step):
    def build(self, x):
        noise = torch.rand(5, 4, generator=self.noise) + torch.randn(5, 4, generator=self.more[0])
        loss = self.model(x + noise).square().mean()
        loss.backward()
        return loss


def test_generators_of_graph_and_modules() -> None:
    def make() -> mg.Graph:
        noise, more = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        return Drawing(Generators(), noise=noise, more=[more])

    graph = check(make)
    assert set(graph.state_dict()["graph.rng"]["generators"]) == {"noise", "more[0]", "model.generator"}
