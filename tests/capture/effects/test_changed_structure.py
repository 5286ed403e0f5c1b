"""A step that changes what modules and objects consist of leaves what eager mode leaves, or is refused by name."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import monograph as mg
from tests.support import Side, assert_same, train_eagerly


class Settings:
    """An object that is no module."""

    def __init__(self) -> None:
        self.scale, self.function = 2.0, torch.tanh


class Model(nn.Module):
    """Its forward is given; it has a little of everything that a forward may change."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.5)
        self.layers, self.table = nn.ModuleList([nn.Tanh()]), nn.ModuleDict()
        self.flag, self.weights, self.function = 1.0, torch.full((4,), 2.0), torch.tanh
        self.settings, self.items, self.late = Settings(), [1], None
        self.b.weight.mark = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Step(mg.Graph):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.add_optimizer(side.optimizer)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def make_side(run: Callable[..., Any]) -> Side:
    torch.manual_seed(0)
    model = Model(run)
    return Side(model, torch.optim.AdamW(list(model.parameters()), lr=0.01))


def batches() -> Iterator[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return iter([(torch.randn(2, 4, generator=generator),) for _ in range(4)])


def trained(run: Callable[..., Any]) -> mg.Graph:
    """The graph, after steps that were all eager's."""
    side = make_side(run)
    torch.manual_seed(2)
    expected = train_eagerly(side, lambda model, x: model(x).square().mean(), batches())
    side = make_side(run)
    step = Step(side)
    torch.manual_seed(2)
    for index, (x,) in enumerate(batches()):
        assert_same(expected[index], {"loss": step(x), **side.state()}, f"step {index}")
    return step


# --- submodules ----------------------------------------------------------------------------------------------------


def another_activation(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.act(self.a(x))
    self.act = nn.GELU()
    return y


def activation_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(self.act, nn.ReLU):
        self.act = nn.GELU()
    return self.act(self.a(x))


def held_one_in_a_new_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(self.act, nn.Sequential):
        self.act = nn.Sequential(self.b, nn.Tanh())
    return self.act(self.a(x))


def exchanged(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.a, self.b = self.b, self.a
    return y


def under_another_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "current"):
        self.current = self.a
        return self.b(x)
    return self.current(x)


def deleted(self: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(self, "act"):
        x = self.act(x)
        del self.act
    return self.a(x)


def set_to_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.act is None else self.act(x)
    self.act = None
    return self.a(x)


def made_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.late is None:
        self.late = nn.Softplus()
    return self.late(self.a(x))


def appended(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
    self.layers.append(nn.Tanh())
    return self.a(x)


def deleted_from_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if len(self.layers):
        x = self.layers[0](x)
        del self.layers[0]
    return x


def put_into_a_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.table["made"](x) if "made" in self.table else x
    self.table["made"] = nn.Sigmoid()
    return self.a(x)


def dropout_made_anew(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.drop(self.a(x))
    self.drop = nn.Dropout(0.25)
    return x


def of_another_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.act(self.a(x))
    self.act.__class__ = nn.Tanh
    return y


# --- modes ---------------------------------------------------------------------------------------------------------


def to_eval(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.drop(self.a(x))
    self.drop.eval()
    return x


def all_to_eval(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x) * (2 if self.training else 3)
    self.eval()
    return x


def mode_as_an_argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = functional.dropout(self.a(x), training=self.b.training)
    self.b.training = False
    return x


# --- attributes ----------------------------------------------------------------------------------------------------


def number_deleted(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if hasattr(self, "flag"):
        x = x * 3
        del self.flag
    return x


def number_popped(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x) * getattr(self, "flag", 5.0)
    self.__dict__.pop("flag", None)
    return x


def function_deleted(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if hasattr(self, "function"):
        x = self.function(x)
        del self.function
    return x


def function_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.function(self.a(x))
    self.function = torch.sin
    return x


def list_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x) * len(self.items)
    self.items = [*self.items, 2]
    return x


def object_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = self.settings.scale
    self.settings = Settings()
    self.settings.scale = scale + 1
    return self.a(x) * scale


def of_an_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if hasattr(self.settings, "scale"):
        x = x * self.settings.scale
        del self.settings.scale
    return x


def tensor_deleted(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if hasattr(self, "weights"):
        x = x * self.weights
        del self.weights
    return x


def tensor_set_to_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if self.weights is not None:
        x = x * self.weights
        self.weights = None
    return x


def number_on_a_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = getattr(self.a.weight, "scale", 1.0)
    self.a.weight.scale = min(scale + 1.0, 3.0)
    return self.a(x) * scale


def text_on_a_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    if getattr(self.a.weight, "kind", None) is None:
        self.a.weight.kind = "seen"
        return self.b(x)
    return self.a(x)


def deleted_on_a_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(self.b.weight, "mark"):
        del self.b.weight.mark
        return self.b(x)
    return self.a(x)


def tensor_on_a_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    last = getattr(self.a.weight, "last", None)
    y = self.a(x) if last is None else self.a(x) + last.mean()
    self.a.weight.last = y.detach()
    return y


CASES = [
    another_activation, activation_once, held_one_in_a_new_one, exchanged, under_another_name, deleted, set_to_none,
    made_late, appended, deleted_from_a_list, put_into_a_dict, dropout_made_anew, of_another_class, to_eval,
    all_to_eval, mode_as_an_argument, number_deleted, number_popped, function_deleted, function_replaced,
    list_replaced, object_replaced, of_an_object, tensor_deleted, tensor_set_to_none,
    number_on_a_parameter, text_on_a_parameter, deleted_on_a_parameter, tensor_on_a_parameter,
]  # fmt: skip
ONCE = [
    activation_once, held_one_in_a_new_one, under_another_name, deleted, set_to_none, made_late,
    deleted_from_a_list, to_eval, all_to_eval, mode_as_an_argument, number_deleted, number_popped,
    function_deleted, of_an_object, tensor_deleted, tensor_set_to_none, text_on_a_parameter,
    deleted_on_a_parameter, tensor_on_a_parameter,
]  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_the_structure_is_eagers_after_each_step(run: Callable[..., Any]) -> None:
    graph = trained(run)
    if run in ONCE:
        assert len(graph.builds) == 2, [build.reason for build in graph.builds]


def head_made_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.late is None:
        self.late = nn.Linear(4, 2)
    return self.late(self.a(x))


def norm_made_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.layers.append(nn.Sequential(nn.BatchNorm1d(4, affine=False)))
    return self.layers[-1](self.a(x))


@pytest.mark.parametrize(
    ("run", "named"), [(head_made_late, "model.late"), (norm_made_late, "model.layers.1")]
)
def test_a_module_with_tensors_that_a_step_makes_and_leaves_is_refused(run: Any, named: str) -> None:
    side = make_side(run)
    before = list(side.model.state_dict())
    with pytest.raises(mg.CaptureError, match=rf"(?s)makes the module {named}, .*before the first step"):
        Step(side)(torch.ones(2, 4))
    assert list(side.model.state_dict()) == before


def test_compiling_changes_no_structure() -> None:
    side = make_side(activation_once)
    Step(side).compile(torch.ones(2, 4))
    assert isinstance(side.model.act, nn.ReLU)


@pytest.mark.parametrize("run", [activation_once, number_deleted, all_to_eval], ids=lambda run: run.__name__)
def test_micro_batches_find_the_same_structure(run: Callable[..., Any]) -> None:
    step = Step(make_side(run))
    step.config.set_gradient_accumulation_steps(2)
    with pytest.raises(mg.CaptureError, match="the second micro-batch would find another"):
        step(torch.ones(4, 4))


class Table(nn.Module):
    """A buffer that grows with the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.grow(8)

    def grow(self, size: int) -> None:
        self.register_buffer("table", torch.arange(size).float().cos())  # here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > len(self.table):
            self.grow(x.shape[0])
        return self.layer(x) * self.table[: x.shape[0], None]


def test_a_buffer_that_grows_is_refused_at_its_line() -> None:
    model = Table()
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1))
    step(torch.ones(4, 4), torch.zeros(4, 4))
    with pytest.raises(
        mg.CaptureError, match=r"assigns to buffer model.table .*\n.*\n.*table\[:size\]"
    ) as caught:
        step(torch.ones(12, 4), torch.zeros(12, 4))
    where = caught.value.where
    assert where is not None
    assert linecache.getline(where.file, where.line).endswith("# here\n")
    assert model.table.shape == (8,)
