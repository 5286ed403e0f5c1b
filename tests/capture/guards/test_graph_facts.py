"""Stale replay: facts of the graph and modes of torch are changed, eager is the judge; builds do not pile up."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import monograph as mg
from tests.capture.guards.world import (
    Activated,
    Case,
    Fresh,
    Loss,
    World,
    batch,
    check,
    infer,
    make_world,
    put_back,
    set_to,
    swap_data,
)
from tests.support import assert_same

# --- facts of the graph and of what it holds ----------------------------------------------------------------


class Slotted:
    """A loss whose attributes are slots."""

    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 0.5

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out, y) * self.alpha


class Weighted:
    """A loss with nothing but a tensor."""

    def __init__(self) -> None:
        self.weight = torch.tensor([1.0, 2.0, 3.0])

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(out, y, weight=self.weight)


class Perceptual:
    """A plain object that holds a module which the graph does not know."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        for parameter in self.net.parameters():
            parameter.requires_grad_(False)

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(out).square().mean()


def two_losses(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.first(self.model(x), y) + self.second(self.model(x), y)
    loss.backward()
    return loss


def by_items(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.loss(self.model(x), y) * self.weights[0] * self.settings["scale"]
    loss.backward()
    return loss


def optional_part(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = self.loss(self.model(x), y)
    if getattr(self, "penalty", None) is not None:
        loss = loss + self.penalty * self.model.fc.weight.square().sum()
    loss.backward()
    return loss


def other_model(world: World) -> None:
    world.kept["model"] = world.model
    world.model = Activated()
    world.step.model = world.model


def model_back(world: World) -> None:
    world.model, world.kept["model"] = world.kept["model"], world.model
    world.step.model = world.model


GRAPH_FACTS = {
    "alpha of the graph": Case(
        set_to("step.alpha", 2.0), "alpha changed from 1.0 to 2.0", back=put_back("step.alpha")
    ),
    "alpha of a plain loss": Case(set_to("step.loss.alpha", 2.0), "alpha", back=put_back("step.loss.alpha")),
    "alpha of a loss with slots": Case(
        set_to("step.loss.alpha", 2.0),
        "alpha",
        back=put_back("step.loss.alpha"),
        options={"parts": lambda: {"loss": Slotted()}},
    ),
    "the weight tensor of a plain loss": Case(
        set_to("step.loss.weight", Fresh(lambda: torch.tensor([3.0, 2.0, 1.0]))),
        "weight",
        options={"parts": lambda: {"loss": Weighted()}},
    ),
    "the loss object": Case(
        set_to("step.loss", Fresh(lambda: Loss(3.0))), "loss", back=put_back("step.loss")
    ),
    "the loss function": Case(
        set_to("step.loss", functional.multi_margin_loss),
        "loss",
        back=put_back("step.loss"),
        options={"parts": lambda: {"loss": functional.cross_entropy}},
    ),
    "one of two losses of one class": Case(
        set_to("step.first.alpha", 2.0),
        "alpha",
        body=two_losses,
        options={"parts": lambda: {"first": Loss(0.1), "second": Loss(0.7)}},
    ),
    "an item of a list of the graph": Case(
        lambda w: w.step.weights.__setitem__(0, 3.0),
        "weights",
        body=by_items,
        options={"parts": lambda: {"weights": [1.0, 2.0], "settings": {"scale": 1.0}}},
    ),
    "an item of a dict of the graph": Case(
        lambda w: w.step.settings.update(scale=3.0),
        "settings",
        body=by_items,
        options={"parts": lambda: {"weights": [1.0, 2.0], "settings": {"scale": 1.0}}},
    ),
    "an attribute of the graph that was absent": Case(
        set_to("step.penalty", 0.5),
        "penalty",
        back=lambda w: delattr(w.step, "penalty"),
        body=optional_part,
    ),
    "eval mode of a module in a plain object": Case(
        lambda w: w.step.loss.net.eval(),
        "training",
        back=lambda w: w.step.loss.net.train(),
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "a parameter of a module in a plain object": Case(
        lambda w: setattr(w.step.loss.net[0], "weight", nn.Parameter(torch.ones(3, 3), requires_grad=False)),
        "weight",
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "the storage of a module in a plain object": Case(
        lambda w: setattr(w.step.loss.net[0].weight, "data", torch.ones(3, 3)),
        "storage",
        options={"parts": lambda: {"loss": Perceptual()}},
    ),
    "graph.model is another module": Case(
        other_model, "replaced", back=model_back, builds_back=3, body=infer, options={"optimizer": None}
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", GRAPH_FACTS)
def test_facts_of_the_graph(name):
    check(GRAPH_FACTS[name])


def test_a_changed_configuration_is_a_new_build():
    world = make_world(True)
    world.step(*batch())
    world.step.config.keep_gradients(True)
    world.step(*batch())
    assert len(world.step.builds) == 2
    assert "configuration" in world.step.builds[-1].reason
    assert world.model.fc.weight.grad is not None
    world.step.config.keep_gradients(False)
    world.step(*batch())
    assert len(world.step.builds) == 2


def test_max_builds_is_no_reason_for_a_build():
    world = make_world(True)
    world.step(*batch())
    world.step.config.max_builds(1)
    world.step(*batch())
    assert len(world.step.builds) == 1
    with pytest.raises(mg.CaptureError, match="argument x"):
        world.step(*batch(rows=7))


# --- modes of torch -----------------------------------------------------------------------------------------


def softly(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.model(x) + torch.ones(())


def fill_uninitialised(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.float64).scatter_add(0, y, torch.ones(5, dtype=torch.float64))


class Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_error: object) -> None:
        torch.use_deterministic_algorithms(False)


class DefaultDouble:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_error: object) -> None:
        torch.set_default_dtype(torch.float32)


class NoFastPath:
    def __enter__(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


def in_eval(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.model.eval()
    with torch.no_grad():
        return self.model(x.expand(2, 5, 4))


def nothing(_world: World) -> None:
    pass


def linear_only() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh())


MODES = {
    "no_grad": Case(
        nothing, "grad mode", back=nothing, inside=torch.no_grad, body=infer, options={"optimizer": None}
    ),
    "inference_mode": Case(
        nothing, "grad mode", back=nothing, inside=torch.inference_mode, body=infer,
        options={"optimizer": None, "model": linear_only},
    ),
    "autocast": Case(
        nothing, "autocast", back=nothing, inside=lambda: torch.autocast("cpu", torch.bfloat16)
    ),
    "default dtype": Case(nothing, "default dtype", back=nothing, inside=DefaultDouble, body=lambda self, x, y: torch.ones(3) + x.sum()),
    "kernels of attention": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=lambda: sdpa_kernel(SDPBackend.MATH),
        body=lambda self, x, y: functional.scaled_dot_product_attention(*[x.expand(2, 5, 4)] * 3),
        options={"optimizer": None},
    ),
    "mkldnn": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=lambda: torch.backends.mkldnn.flags(enabled=False),
        body=lambda self, x, y: self.model(x)[0],
        options={"optimizer": None, "model": lambda: nn.LSTM(4, 3)},
    ),
    "fast path of transformers": Case(
        nothing,
        "choice of kernels",
        back=nothing,
        inside=NoFastPath,
        body=in_eval,
        options={"optimizer": None, "model": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)},
    ),
    "deterministic algorithms": Case(nothing, "deterministic", back=nothing, inside=Deterministic),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_modes_around_the_call(name):
    case = MODES[name]
    if name == "default dtype":
        case.options = {"optimizer": None}
    check(case)


def test_grad_mode_counts_where_requires_grad_is_read_without_grad():
    """Under no_grad torch's own tensor guards do not look at requires_grad."""

    def penalty(self: Any) -> torch.Tensor:
        return sum(p.square().sum() for p in self.model.parameters() if p.requires_grad)

    expected = []
    for graph in (False, True):
        world = make_world(graph, penalty, optimizer=None)
        with torch.no_grad():
            first = world.step()
            world.model.fc.requires_grad_(False)
            expected.append((first, world.step()))
    assert_same(expected[0], expected[1])


# --- builds do not pile up, and do not hold what is gone ----------------------------------------------------


def test_two_states_in_turn_need_one_build():
    world = make_world(True, infer, optimizer=None)
    world.model.eval()
    x, y = batch()
    for _ in range(4):
        world.step(x, y)
        swap_data(world)
    assert len(world.step.builds) == 1


def test_a_model_that_was_replaced_can_be_freed():
    world = make_world(True, infer, optimizer=None)
    world.step(*batch())
    gone = weakref.ref(world.model.head.weight)
    world.model.head = nn.Linear(6, 3)
    world.step(*batch())
    world.step(*batch())
    gc.collect()
    assert gone() is None


def test_many_builds_are_said_aloud(caplog):
    class Shift(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.shift = "0"

        def build(self, x):
            return x + int(self.shift)

    graph = Shift()
    with caplog.at_level("WARNING", logger="monograph"):
        for graph.shift in "01234567":
            graph(torch.ones(2))
        first, fourth = (record.getMessage() for record in caplog.records)  # of its cause
        assert "build 1: graph.shift changed from '0' to '1'" in first
        assert "build 4: graph.shift changed from '3' to '4'" in fourth
        assert "config.max_builds(n)" in fourth
        caplog.clear()
        for number in range(8, 20):
            graph.shift = str(number)
            graph(torch.ones(2))
        eighth, sixteenth = (record.getMessage() for record in caplog.records)
    assert "build 8: graph.shift changed from '7' to '8'; the 9 builds so far have taken" in eighth
    assert "build 16: graph.shift changed from '15' to '16'; the 17 builds so far have taken" in sixteenth


def test_where_an_argument_begins_is_a_fact_for_absolute_positions():
    """as_strided counts from the beginning of the memory, not of the tensor."""
    memory = torch.arange(20.0)
    graph = mg.trace(lambda x: x.as_strided((2,), (1,), 1) * 2)
    slope = mg.trace(lambda x: torch.autograd.grad(x.as_strided((1,), (1,), 4).sum(), x)[0])
    for begin in (0, 4, 0):
        x = memory[begin : begin + 9]
        assert graph(x).tolist() == [2.0, 4.0]
        leaf = x.detach().requires_grad_()
        assert slope(leaf).nonzero().tolist() == [[4 - begin]]
    assert [len(graph.builds), len(slope.builds)] == [2, 2]
    assert "argument x begins at element 4 of its memory, not at 0" in graph.builds[1].reason
    sparse = torch.tensor([0.0, 3.0]).to_sparse()  # which begins nowhere
    product = mg.trace(lambda x, other: x.as_strided((2,), (1,), 1) * other.to_dense())
    assert [product(memory[begin:], sparse).tolist() for begin in (0, 4)] == [[0.0, 6.0]] * 2
    relative = mg.trace(lambda x: x.as_strided((2,), (1,)) * 2)
    assert [relative(memory[begin : begin + 9]).tolist() for begin in (0, 4)] == [[0.0, 2.0], [8.0, 10.0]]
    scattered = mg.trace(lambda x: x.as_strided_scatter(torch.zeros(1), (1,), (1,)))
    assert [scattered(memory[begin : begin + 2]).tolist() for begin in (0, 4)] == [[0.0, 1.0], [0.0, 5.0]]
    assert len(relative.builds) == len(scattered.builds) == 1


@pytest.mark.long
def test_what_imports_run_is_no_fact_of_a_step():
    """The first capture of a process imports parts of torch, whose modules make classes by typing_extensions."""
    code = """
import torch
import monograph as mg
model = torch.nn.Linear(2, 2)
step = mg.train_graph(model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters()))
step(torch.ones(3, 2), torch.ones(3, 2))
print(step.explain())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "maximize = False" in done.stdout
    assert "typing_extensions" not in done.stdout
