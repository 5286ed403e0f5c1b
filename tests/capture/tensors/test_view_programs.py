"""Views and ops in place: bits, strides and shared memory of eager mode, or an error that names the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import monograph as mg
from monograph.capture.tensors.functional import view_writes
from monograph.capture.tensors.functional.written_twice import check_writes
from monograph.ir import memory
from monograph.ir.memory import base_of
from tests.stress.view_programs import check
from tests.support import assert_same
from tests.support.choice import only_quick

Tensor = torch.Tensor
Y = torch.linspace(-2.0, 2.0, 37 * 53).reshape(37, 53).sin() * 3


def transposed(y: Tensor, change: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
    z = (y * 2).t()
    change(z)
    return z.unfold(0, 2, 1).sum(), z.sum(0), z, z[1:]


def diagonal(y: Tensor) -> Tensor:
    z = (y * 2).t()
    z.fill_diagonal_(3.0)
    return z


def diagonal_of_a_part(y: Tensor) -> tuple[Tensor, ...]:
    z = y * 2
    part = z[1:5, 2:7].t()
    part.fill_diagonal_(3.0)
    return z, part, z.sum(1)


def windows(y: Tensor) -> tuple[Tensor, ...]:
    z = y * 2
    window = z.unfold(1, 5, 5)
    window.mul_(2.0)
    return z, window


def a_row_of_an_expanded_tensor(y: Tensor) -> Tensor:
    z = y * 2
    z.expand(4, 37, 53)[1].mul_(2.0)
    return z


def strided_part_of_a_view(y: Tensor) -> tuple[Tensor, ...]:
    z = y * 2
    part = z[3:].as_strided((4, 5), (53, 2))
    part.add_(1.0)
    return z, part


def views_of_views_in_turn(y: Tensor) -> tuple[Tensor, ...]:
    z, other = y * 2, y + 1
    windows = z.unfold(1, 5, 5)
    for number in range(3):
        windows.mul_(1.5)
        windows[1].t().sub_(number)  # a view of windows that were written
        rows = z[3:]
        rows.add_(0.5)
        rows.as_strided((4, 5), (53, 2)).mul_(1.25)
        part = z.t()[2:].as_strided((4, 5), (53, 2))
        part[1].add_(1.0)
        part.t()[2].neg_()
        other[number:].t().mul_(2.0)  # and another memory, without any
        z.sub_(0.25)
    return z, windows, other


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "masked_fill_": lambda z: z.masked_fill_(z > 1.5, 0.25),
    "elu_": lambda z: F.elu_(z),
    "hardtanh_": lambda z: F.hardtanh_(z, -0.5, 0.5),
    "index_add_": lambda z: z.index_add_(0, torch.zeros(1, dtype=torch.long), torch.ones_like(z[:1])),
    "index_put_": lambda z: z.__setitem__(z > 1, 0.5),
    "cumsum_": lambda z: z.cumsum_(0),
    "triu_": lambda z: z.triu_(),
}
BODIES: dict[str, Callable[[Tensor], Any]] = {
    **{name: lambda y, change=change: transposed(y, change) for name, change in CHANGES.items()},
    "a diagonal": diagonal,
    "a diagonal of a part": diagonal_of_a_part,
    "windows": windows,
    "a row of an expanded tensor": a_row_of_an_expanded_tensor,
    "a strided part": strided_part_of_a_view,
    "views of views, in turn": views_of_views_in_turn,
}


@pytest.mark.every_case
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_strides_after_an_op_in_place_are_those_of_eager_mode(body: Callable[[Tensor], Any]) -> None:
    expected, made = body(Y), mg.trace(body)(Y)
    assert_same(expected, made)
    for one, other in zip(
        *(item if isinstance(item, tuple) else (item,) for item in (expected, made)), strict=True
    ):
        assert one.stride() == other.stride()


def test_the_memory_of_a_tensor_is_looked_for_once_for_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(node: fx.Node) -> fx.Node | None:
        asked.append(node)
        return base_of(node)

    monkeypatch.setattr(memory, "base_of", counted)
    monkeypatch.setattr(view_writes, "base_of", counted)
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.zeros(3, 3)
    for _ in range(200):
        for target, *rest in ((torch.ops.aten.t.default,), (torch.ops.aten.add_.Tensor, 1.0)):
            shown = node.meta["val"]
            node = graph.call_function(target, (node, *rest))
            node.meta["val"] = shown.t() if not rest else shown
    graph.output([node])
    module = fx.GraphModule(nn.Module(), graph)
    check_writes(graph)
    view_writes.write_directly(module)
    assert list(memory.last_writers(graph)) == [0]
    assert len(asked) <= 3 * len(graph.nodes)


@pytest.mark.parametrize("body", [diagonal, windows, strided_part_of_a_view], ids=lambda body: body.__name__)
def test_gradients_through_such_writes(body: Callable[[Tensor], Any]) -> None:
    def loss(y: Tensor) -> Tensor:
        found = body(y)
        return (found if isinstance(found, Tensor) else found[0]).square().sum()

    class Step(mg.Graph):
        def build(self, y: Tensor) -> Tensor:
            out = loss(y)
            out.backward()
            return out

    plain, given = Y.clone().requires_grad_(), Y.clone().requires_grad_()
    expected = loss(plain)
    expected.backward()
    assert_same(expected, Step()(given))
    assert_same(plain.grad, given.grad)


TWICE: dict[str, Callable[[Tensor], Any]] = {
    "fill_ of an expanded tensor": lambda y: (y * 2).expand(2, 37, 53).fill_(1.0),
    "an index of an expanded tensor": lambda y: (
        (y * 2).expand(2, 37, 53).__setitem__(Y.expand(2, 37, 53) > 0, 1.0)
    ),
    "elu_ of windows": lambda y: F.elu_((y * 2).unfold(0, 3, 1)),
}


@pytest.mark.parametrize("body", TWICE.values(), ids=TWICE.keys())
def test_a_view_that_shows_elements_twice_is_not_written(body: Callable[[Tensor], Any]) -> None:
    with pytest.raises(mg.MonographError, match="shows elements of memory twice") as caught:
        mg.trace(body)(Y)
    assert "test_view_programs.py" in str(caught.value)


def one_statistic(y: Tensor) -> Tensor:
    statistic = torch.zeros(53)
    return F.batch_norm(y, statistic, statistic, training=True)


def added_in_turn(y: Tensor) -> Tensor:
    first, second = y * 2, y * 3
    torch._foreach_add_([first, second], [second, first])
    return second


ONE_FOR_SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "both statistics of a norm": one_statistic,
    "a tensor twice in a list": lambda y: torch._foreach_mul_([z := y * 2, z], 3.0),
    "what a list changed first": added_in_turn,
    "halves that overlap": lambda y: torch._foreach_mul_([(z := y * 2)[:20], z[10:]], 3.0),
}


@pytest.mark.parametrize("body", ONE_FOR_SEVERAL.values(), ids=ONE_FOR_SEVERAL.keys())
def test_an_op_that_changes_several_tensors_is_given_each_once(body: Callable[[Tensor], Any]) -> None:
    with pytest.raises(mg.MonographError, match="two share memory") as caught:
        mg.trace(body)(Y)
    assert "test_view_programs.py" in str(caught.value)


def test_lists_that_go_side_by_side_may_share() -> None:
    def doubled(y: Tensor) -> list[Tensor]:
        z = y * 2
        halves = [z[:20], z[20:]]
        torch._foreach_add_(halves, halves)
        return [z, *halves]

    for expected, got in zip(doubled(Y), mg.trace(doubled)(Y), strict=True):
        assert_same(expected, got)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_parameter_that_an_optimizer_has_twice(options: dict[str, bool]) -> None:
    def model() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        made = nn.Linear(53, 3)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            return made, torch.optim.AdamW([*made.parameters(), made.weight], **options)

    plain, optimizer = model()
    made, given = model()
    step = mg.train_graph(made, lambda out, _: out.square().mean(), given)
    if options == {"foreach": False}:
        for _ in range(2):
            optimizer.zero_grad()
            plain(Y).square().mean().backward()
            optimizer.step()
            step(Y, Y)
        assert_same(plain.weight, made.weight)
    else:
        with pytest.raises(mg.MonographError, match="two share memory"):
            step(Y, Y)


@pytest.mark.parametrize("seeds", only_quick([range(20), range(200, 260)], range(20)), ids=str)
def test_random_programs(seeds: range) -> None:
    """The seeds between are those of `test_both_ways.py`; `make stress` tries thousands."""
    outcomes = [check(seed) for seed in seeds]
    assert not [outcome for outcome in outcomes if outcome.startswith("WRONG") or "capture failed" in outcome]
    assert outcomes.count("same") > 0.8 * len(seeds)
