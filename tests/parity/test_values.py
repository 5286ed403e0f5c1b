"""What goes into build() and what comes out: nested values, floats, views, tensors changed in place, free tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import Side, assert_same
from tests.support.case import STEPS, adamw

Step = Callable[..., Any]  # step(model, *args, **kwargs): forward and backward, without the update
Arguments = Callable[[torch.Generator, int], tuple[tuple[Any, ...], dict[str, Any]]]


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    scale: float
    name: str = "item"
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Report:
    loss: torch.Tensor
    parts: dict[str, Any]


class TrainStep(mg.Graph):
    def __init__(self, side: Side, step: Step) -> None:
        super().__init__()
        self.model = side.model
        self.step = step
        self.add_optimizer(side.optimizer)

    def build(self, *args, **kwargs):
        return self.step(self.model, *args, **kwargs)


def make_side() -> Side:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return Side(model, adamw(model.parameters()))


def plain(item: Any) -> Any:
    """Types, requires_grad and content of a nested value, in a form that assert_same can compare."""
    if isinstance(item, torch.Tensor):
        return item.requires_grad, isinstance(item, nn.Parameter), item.detach().clone()
    if dataclasses.is_dataclass(item):
        return type(item).__name__, {
            field.name: plain(getattr(item, field.name)) for field in dataclasses.fields(item)
        }
    if isinstance(item, dict):
        return type(item).__name__, {key: plain(entry) for key, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item).__name__, [plain(entry) for entry in item]
    return type(item).__name__, item


def xy(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 4, generator=g), torch.randn(5, 2, generator=g)


def compare(step: Step, arguments: Arguments, builds: int = 1) -> tuple[Any, Any, TrainStep]:
    """Run both sides on equal arguments; results, arguments afterwards and state are the same after each step."""
    eager, graph = make_side(), make_side()
    train = TrainStep(graph, step)
    for index in range(STEPS):
        args, kwargs = arguments(torch.Generator().manual_seed(index), index)
        eager.optimizer.zero_grad()
        expected = step(eager.model, *args, **kwargs)
        eager.optimizer.step()
        given, named = arguments(torch.Generator().manual_seed(index), index)
        got = train(*given, **named)
        assert_same(plain(expected), plain(got), f"result {index}")
        assert_same(plain([args, kwargs]), plain([given, named]), f"arguments {index}")
        assert_same(eager.state(), graph.state(), f"state {index}")
    assert len(train.builds) == builds, train.explain()
    return (args, expected), (given, got), train


def backward_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


# --- nested values ---------------------------------------------------------------------------------------------------


def nested_step(model, batch, pair, *more, item, mask=None, reduction="mean"):
    out = model(batch["x"]) + pair.x[:, :2] + more[0][1] * item.scale
    if mask is not None:
        out = out * mask
    loss = F.mse_loss(out, batch["nested"]["y"], reduction=reduction) + pair.y[0]
    loss.backward()
    parts = {"out": out, "list": [loss, None, {"k": (out.detach(), 3)}], "pair": Pair(out, "text")}
    return Report(loss, parts), [Item(out.sum(), item.scale, item.name)], None


def nested_arguments(g, index):
    x, y = xy(g)
    more = (torch.randn(5, 2, generator=g), torch.randn(5, 2, generator=g)), None
    batch = {"x": x, "nested": {"y": y, "unused": None}, "name": "batch"}
    item = Item(x, 0.5 + index, rest=[torch.ones(1)])
    return (batch, Pair(x, [0.25 * index]), *more), {"item": item, "mask": torch.ones(5, 2)}


def test_nested_arguments_and_results_keep_their_form():
    compare(nested_step, nested_arguments)


def test_results_with_names_made_in_c_keep_their_type():
    def step(model, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return {"loss": loss, "largest": torch.max(model(x), 1), "sorted": [torch.sort(y)]}

    _, (_, got), _ = compare(step, lambda g, _: (xy(g), {}))
    assert type(got["largest"]) is torch.return_types.max
    assert got["largest"].indices.dtype is torch.int64


def test_a_moving_float_does_not_rebuild():
    def step(model, x, y, weight, *, sign=1.0):
        out = model(x)
        loss = F.mse_loss(out, y) + sign * weight * out.square().mean() / (1.0 + weight**2)
        loss.backward()
        return loss, weight * 2.0, weight

    compare(step, lambda g, index: ((*xy(g), 0.1 * index), {"sign": -1.5 + index}))


def test_other_plain_values_belong_to_the_signature():
    def step(model, x, y, power: int, mode: str, square: bool):
        out = model(x) ** power
        loss = F.mse_loss(out.square() if square else out, y, reduction=mode)
        loss.backward()
        return loss

    def arguments(g, index):
        return (*xy(g), 1 + index % 2, "mean", index > 3), {}

    compare(step, arguments, builds=3)


def test_keyword_order_and_none():
    def step(model, x, *, y=None, scale=None):
        out = model(x) if scale is None else model(x) * scale
        loss = out.square().mean() if y is None else F.mse_loss(out, y)
        loss.backward()
        return {"loss": loss, "y": y}

    def arguments(g, index):
        x, y = xy(g)
        return (x,), ({"y": y, "scale": torch.tensor(2.0)} if index % 2 else {"y": None})

    compare(step, arguments, builds=2)


# --- outputs that are not new ----------------------------------------------------------------------------------------


def test_an_output_may_be_a_parameter_an_input_or_a_view():
    def step(model, x, y):
        loss = backward_of(model, x, y)
        first = model[0].weight
        return loss, first, x, first.t(), x[1:], y.view(-1), first.detach(), first.clone(), loss

    (_, expected), (given, got), train = compare(step, lambda g, _index: (xy(g), {}))
    assert got[1] is train.model[0].weight
    assert got[2] is given[0]
    assert got[0] is got[8]
    for index, base in ((4, given[0]), (5, given[1])):
        assert got[index].data_ptr() == expected[index].data_ptr() - (
            expected[2 if index == 4 else 5].data_ptr() - base.data_ptr()
        )
        assert got[index].untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_an_output_may_show_what_the_step_changes():
    """Views of a parameter that is updated, of a buffer and of an argument changed in place: live, as in eager mode."""

    def step(model, x, y):
        loss = backward_of(model, x, y)
        row = x[1]
        x.add_(1.0)
        weight = model[0].weight
        return loss, weight[1:, ::2], weight.t(), weight.detach()[2], row, x.t(), x.split(2)[1], x.clone()[0]

    _, (given, got), train = compare(step, lambda g, _index: (xy(g), {}))
    owners = [train.model[0].weight] * 3 + [given[0]] * 3
    for item, owner in zip(got[1:7], owners, strict=True):
        assert item.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
    assert got[7].untyped_storage().data_ptr() != given[0].untyped_storage().data_ptr()
    with torch.no_grad():
        train.model[0].weight.fill_(7.0)
    assert all(bool((item == 7.0).all()) for item in got[1:4])
    got[4].zero_()
    assert not given[0][1].any()


def test_an_argument_that_gets_a_gradient_in_place_requires_one_afterwards():
    graph = mg.trace(lambda x, y: x.mul_(y))
    y = torch.tensor([2.0, 3.0], requires_grad=True)
    for _ in range(2):
        x = torch.ones(2)
        assert graph(x, y) is x
        assert x.tolist() == [2.0, 3.0]
        assert (x.requires_grad, x.is_leaf) == (True, False)
        with pytest.raises(mg.GraphBoundaryError):
            x.sum().backward()
    assert len(graph.builds) == 1


@torch.library.custom_op("values::twice_", mutates_args=("x",))
def twice_(x: torch.Tensor) -> None:
    x.mul_(2)


def test_a_custom_op_that_changes_its_argument():
    def step(model, x, y):
        twice_(x)
        hidden = x[:, :2] + 0.0
        twice_(hidden)
        loss = F.mse_loss(model(x) + hidden, y)
        loss.backward()
        return loss, hidden

    compare(step, lambda g, _: (xy(g), {}))


def test_a_list_that_build_changes_is_the_callers(caplog):
    def grow(items, table):
        items.append(items[0] * 2)
        return items[0] + table.pop("shift")

    graph = mg.trace(grow)
    items, table = [torch.ones(2)], {"shift": 1.0}
    assert graph(items, table).tolist() == [2.0, 2.0]
    assert items[1].tolist() == [2.0, 2.0]
    assert table == {}
    assert not caplog.text


def test_an_op_with_several_results_gives_each_its_own_memory():
    """The output of a BatchNorm and its new statistics come from one op."""
    module, counterpart = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    graph = mg.trace(module)
    x = torch.randn(4, 3)
    assert_same(plain(counterpart(x)), plain(graph(x)))
    assert_same(counterpart.state_dict(), module.state_dict())


def test_a_view_of_a_buffer_that_is_set_anew_shows_the_new_one():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            before = self.seen[:2]
            self.seen = self.seen + x.detach().sum(0)
            return x.sum(), before, self.seen[1:]

    eager = Counting()
    module = Counting()
    graph = mg.trace(module)
    for index in range(3):
        x = torch.full((2, 4), float(index + 1))
        assert_same(plain(eager(x)), plain(got := graph(x)))
        assert got[2].untyped_storage().data_ptr() == module.seen.untyped_storage().data_ptr()
        assert got[1].untyped_storage().data_ptr() != module.seen.untyped_storage().data_ptr()


def test_outputs_stay_when_the_next_step_runs():
    side = make_side()
    train = TrainStep(side, lambda model, x, y: (backward_of(model, x, y), model(x), x * 2))
    first = train(*xy(torch.Generator().manual_seed(0)))
    before = [item.detach().clone() for item in first]
    train(*xy(torch.Generator().manual_seed(1)))
    assert_same(before, list(first))


# --- changed in place ------------------------------------------------------------------------------------------------


def test_the_caller_sees_an_input_changed_in_place():
    def step(model, x, y):
        x.mul_(2.0)
        x[0] = 7.0
        y[:, 0].zero_()
        loss = backward_of(model, x, y)
        y += 1.0
        return loss, y

    (_, _), (given, got), _ = compare(step, lambda g, _index: (xy(g), {}))
    assert got[1] is given[1]


def test_an_input_in_place_through_a_view_and_strides():
    def step(model, x, y):
        x.t()[1:3].add_(1.0)
        x.as_strided((2, 2), (4, 2)).neg_()
        return backward_of(model, x, y)

    def arguments(g, _index):
        x, y = xy(g)
        return (x.t().contiguous().t(), torch.cat([y, y], 1)[:, 1:3]), {}

    compare(step, arguments)


def test_the_gradient_of_an_input_is_accumulated():
    eager, graph = make_side(), make_side()
    train = TrainStep(graph, backward_of)
    x, y = xy(torch.Generator().manual_seed(0))
    x.requires_grad_(True)
    ours = x.detach().clone().requires_grad_(True)
    for index in range(3):
        eager.optimizer.zero_grad()
        loss = backward_of(eager.model, x, y)
        eager.optimizer.step()
        assert_same(loss.detach(), train(ours, y), f"loss {index}")
        assert_same(x.grad, ours.grad, f"gradient {index}")
    assert len(train.builds) == 1


# --- free tensors ----------------------------------------------------------------------------------------------------


def test_free_tensors_are_read_at_each_step_and_written_back():
    def make(side: Side):
        scale, total, history = torch.full((2,), 2.0), torch.zeros(2), {"seen": [torch.zeros(())]}

        def step(model, x, y):
            out = model(x) * scale
            loss = F.mse_loss(out, y)
            loss.backward()
            with torch.no_grad():
                total.add_(out.mean(0))
                history["seen"][0].add_(1.0)
            return loss, total

        return step, scale, total, history

    eager, graph = make_side(), make_side()
    plain_step, *plain_free = make(eager)
    graph_step, *graph_free = make(graph)
    train = TrainStep(graph, graph_step)
    for index in range(STEPS):
        x, y = xy(torch.Generator().manual_seed(index))
        eager.optimizer.zero_grad()
        expected = plain_step(eager.model, x, y)
        eager.optimizer.step()
        got = train(x, y)
        assert_same(plain(expected), plain(got), f"result {index}")
        assert got[1] is graph_free[1]
        assert_same(plain_free, graph_free, f"free tensors {index}")
        assert_same(eager.state(), graph.state(), f"state {index}")
        for scale in (plain_free[0], graph_free[0]):
            scale.mul_(-1.5)  # by the user, between steps
    assert len(train.builds) == 1


def test_constants_made_in_build():
    table = torch.arange(8.0).view(2, 4)

    def step(model, x, y):
        mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]]) * torch.tensor(0.5)
        index = torch.tensor([0, 1, 1, 0, 1])
        x = x * mask + table[index] + torch.eye(5)[:, :4] + x.new_tensor([1.0, 2.0, 3.0, 4.0])
        mask.add_(1.0)
        return backward_of(model, x * mask, y)

    compare(step, lambda g, _index: (xy(g), {}))


# --- parameters reached from outside of the modules ------------------------------------------------------------------


class ListStep(mg.Graph):
    """Keeps a list of the parameters, to clip by them or to punish their size."""

    def __init__(self, side: Side, kind: str) -> None:
        super().__init__()
        self.model = side.model
        self.kind = kind
        self.params = list(side.model.parameters())
        self.named = dict(side.model.named_parameters())
        self.add_optimizer(side.optimizer)

    def build(self, x, y):
        return list_step(self.kind, self.model, self.params, self.named, x, y)


def list_step(kind: str, model: Any, params: Any, named: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.mse_loss(model(x), y)
    if kind == "penalty":
        loss = loss + 0.01 * sum(p.square().sum() for p in params)
    if kind == "penalty_by_name":
        loss = loss + 0.01 * sum(p.norm() for name, p in named.items() if name.endswith("weight"))
    loss.backward()
    if kind == "norm":
        return loss, nn.utils.clip_grad_norm_(params, 0.1)
    if kind == "value":
        nn.utils.clip_grad_value_(params, 0.01)
    if kind == "by_hand":
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.grad.mul_((0.1 / (total + 1e-6)).clamp(max=1.0))
    if kind == "through_autograd":
        for p, gradient in zip(params, torch.autograd.grad(F.mse_loss(model(x), y), params), strict=True):
            p.grad = p.grad + gradient
    if kind == "foreach":
        torch._foreach_mul_([p.grad for p in params], 0.5)
    return loss


KINDS = ("norm", "value", "penalty", "penalty_by_name", "by_hand", "through_autograd", "foreach")


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_parameters_in_the_graph(kind: str) -> None:
    eager, graph = make_side(), make_side()
    train = ListStep(graph, kind)
    params, named = list(eager.model.parameters()), dict(eager.model.named_parameters())
    for index in range(STEPS):
        x, y = xy(torch.Generator().manual_seed(index))
        eager.optimizer.zero_grad()
        expected = list_step(kind, eager.model, params, named, x, y)
        eager.optimizer.step()
        assert_same(plain(expected), plain(train(x, y)), f"result {index}")
        assert_same(eager.state(), graph.state(), f"state {index}")
    assert len(train.builds) == 1
