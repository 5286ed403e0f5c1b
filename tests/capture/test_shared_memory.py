"""Arguments, buffers and parameters that share memory, and odd ones: as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import Plain, compare, forward, inputs, train
from tests.support import assert_same
from tests.support.steps import detached, graph, linear


def test_overlapping_zero_size_and_0_dim_arguments():
    def build(self: Any, x: torch.Tensor, empty: torch.Tensor, scale: torch.Tensor) -> Any:
        return (
            self.model(x).sum() * scale + empty.sum(),
            empty * 2,
            torch.cat([x[:, :0].flatten(), empty]),
            x.stride(),
        )

    calls = [
        (row[:1].expand(5, 4), torch.empty(0), torch.tensor(float(i)))
        for i, row in enumerate(inputs(3, 5, 4))
    ]
    compare(build, calls=lambda: calls, optimizer=None)


def test_one_tensor_passed_twice():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a * 2 + b, a is b

    compare(build, calls=lambda: [(x, x) for x in inputs(3, 4)], optimizer=None)


def test_one_tensor_passed_twice_and_changed():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    compare(build, calls=lambda: [(x, x) for x in inputs(3, 4)], optimizer=None)


def test_two_views_of_one_storage():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    compare(build, calls=lambda: [(x[:4], x[2:]) for x in inputs(3, 6)], optimizer=None)


def test_two_views_of_one_storage_that_are_changed():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    x = torch.zeros(6)
    step = graph(build)
    with pytest.raises(mg.AliasError, match="a and b share memory") as caught:
        step(x[:4], x[2:])
    assert "clone" in caught.value.hint
    assert_same(torch.zeros(6), x)
    step(x[:4].clone(), x[2:])


def test_a_view_of_a_parameter_that_is_not_changed_while_it_is_read():
    def build(self: Any, x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum() + old.sum()

    model = linear()
    step = graph(build, model=model)
    x = torch.ones(2, 4)
    assert_same((model(x).sum() + model.weight[0].sum()).detach(), step(x, model.weight.detach()[0]).detach())


def test_a_view_of_a_buffer_that_is_changed():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    model = Counting()
    step = graph(build, model=model)
    with pytest.raises(mg.AliasError, match=r"x .*model\.count|model\.count .*x") as caught:
        step(model.count.view(3))
    assert "clone" in caught.value.hint
    step(torch.ones(3))
    with pytest.raises(mg.AliasError):
        step(model.count.view(3))
    assert_same(torch.ones(3), model.count)


def test_an_argument_changed_in_place_is_changed_for_the_caller():
    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y[0].fill_(7)
        return x.sum() + y.sum()

    compare(build, calls=lambda: [(x, x + 1) for x in inputs(3, 2, 4)], optimizer=None)


def test_a_strided_argument_changed_in_place():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 5
        return x * 2

    bases = [inputs(3, 6, 4), inputs(3, 6, 4)]
    first = [graph(build)(b[::2].t()) for b in bases[0]]
    second = [build(None, b[::2].t()) for b in bases[1]]
    assert_same(second, first)
    assert_same(bases[1], bases[0])


def test_an_argument_that_is_returned_is_the_same_object():
    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, {"y": y, "weight": self.model.weight}, x.view(-1)

    model = linear()
    step = graph(build, model=model)
    for x in inputs(2, 2, 4):
        out, named, flat = step(x, x + 1)
        assert out is x
        assert named["weight"] is model.weight
        assert flat.data_ptr() == x.data_ptr()


def test_a_result_that_is_new_state_is_not_changed_by_the_next_step():
    def build(self: Any, x: torch.Tensor) -> Any:
        self.model.count.add_(x.sum())
        return self.model.count.clone(), self.model.count * 1

    def make() -> nn.Module:
        model = nn.Identity()
        model.register_buffer("count", torch.zeros(2))
        return model

    model = make()
    step = graph(build, model=model)
    kept = [step(torch.ones(2)) for _ in range(3)]
    assert_same([torch.full((2,), 2.0 * i) for i in (1, 2, 3)], [first for first, _ in kept])


def test_buffers_that_overlap_in_memory():
    class Overlapping(nn.Module):
        def __init__(self, change: bool) -> None:
            super().__init__()
            base = torch.arange(6.0)
            self.register_buffer("left", base[:4])
            self.register_buffer("right", base[2:])
            self.change = change

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.change:
                self.left.add_(1)
            return x + self.left + self.right

    compare(forward, lambda: Overlapping(False), calls=lambda: inputs(2, 4), optimizer=None)
    with pytest.raises(mg.AliasError, match=r"model\.left and model\.right overlap") as caught:
        graph(forward, model=Overlapping(True))(torch.ones(4))
    assert "clone" in caught.value.hint


def test_parameters_in_one_flat_storage_that_do_not_overlap():
    def make() -> nn.Module:
        model = linear()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        model.weight.data, model.bias.data = flat[:12].view(3, 4), flat[12:]
        return model

    compare(train, make)


def test_a_free_tensor_is_read_live_and_written_back():
    counter = {"plain": torch.zeros(2), "graph": torch.zeros(2)}
    results = []
    for side in ("plain", "graph"):
        count = counter[side]

        def build(self: Any, x: torch.Tensor, count: torch.Tensor = count) -> torch.Tensor:
            count.add_(x)
            return count * 2

        step: Any = Plain(build, None) if side == "plain" else graph(lambda self, x, f=build: f(self, x))
        trail = [detached(step(torch.ones(2)))]
        count.fill_(10)
        trail += [detached(step(torch.ones(2))), count.clone()]
        results.append(trail)
    assert_same(*results)


def test_what_a_norm_gives_is_no_view_of_the_statistics_that_it_changes():
    """The op for norms that names in its schema the statistics it changes, and gives tensors of its own."""

    def build(self: Any, x: torch.Tensor) -> Any:
        norm, statistics = self.model, (self.model.running_mean, self.model.running_var)
        rest = (True, 0.1, 1e-5)
        out = torch.ops.aten._native_batch_norm_legit(x, norm.weight, norm.bias, *statistics, *rest)[0]
        turned = out.detach().t()
        turned.add_(1)
        out.detach().as_strided((2,), (1,)).mul_(2)
        return out.detach(), turned, self.model.running_mean * 2

    compare(build, lambda: nn.BatchNorm1d(4), optimizer=None)
