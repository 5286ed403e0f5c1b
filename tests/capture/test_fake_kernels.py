"""Ops without a fake kernel, or with a wrong one; and nothing of a graph is left behind."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import monograph as mg
from tests.capture.traps import compare, train
from tests.support import assert_same
from tests.support.steps import graph, linear, sgd

# --- ops without a fake kernel, or with a wrong one ---------------------------------------------------------


@torch.library.custom_op("monograph_traps::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    """No fake kernel is registered."""
    return torch.from_numpy(x.detach().numpy() ** 3)


def _cube_setup(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return gradient * 3 * x * x


cube.register_autograd(_cube_backward, setup_context=_cube_setup)


@torch.library.custom_op("monograph_traps::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """Gives columns first; its fake kernel says rows first."""
    return (x * 2).t().contiguous().t()


@turned.register_fake
def _turned_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _turned_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


turned.register_autograd(_turned_backward)


def test_an_op_without_a_fake_kernel(caplog):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = cube(self.model(x)).square().mean()
        loss.backward()
        return loss

    with caplog.at_level(logging.INFO, "monograph"):
        compare(build, lambda: nn.Sequential(linear(), nn.Dropout(0.5)))
    assert "real tensors" in caplog.text
    assert "cube" in caplog.text


def test_what_torch_logs_of_branches_is_held_back_in_a_trace_only(caplog):
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    graph(lambda _self, x: cube(x))(torch.ones(3))
    with caplog.at_level(logging.WARNING, logger.name):
        logger.warning("propagate_real_tensors: a branch of somebody else")
    assert "somebody else" in caplog.text


def test_an_op_whose_fake_kernel_tells_wrong_strides(caplog):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = turned(self.model(x))
        loss = (hidden.t().reshape(-1) * torch.arange(15.0)).mean() + hidden.stride()[0] * hidden.sum()
        loss.backward()
        return loss

    with caplog.at_level(logging.INFO, "monograph"):
        compare(build)
    assert "real tensors" in caplog.text


def test_an_op_whose_fake_kernel_tells_wrong_strides_at_any_size(caplog):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = turned(self.model(x))
        loss = hidden.t().reshape(-1).cumsum(0).mean() + hidden.stride()[0] * hidden.sum()
        loss.backward()
        return loss

    with caplog.at_level(logging.INFO, "monograph"):
        compare(build, calls=lambda: [torch.randn(rows, 4) for rows in (5, 3, 7, 5, 9, 3)], builds=4)
    assert "real tensors" in caplog.text


def test_a_recurrent_layer_behind_an_op_whose_fake_kernel_tells_wrong_strides(caplog, monkeypatch):
    """The kernel of the layer keeps a workspace under grad mode alone, also where it is run once more for a trace.

    The op that has other strides is one of backward, after the first updates, which are undone. It does not write over its
    argument, whose strides are right.
    """
    monkeypatch.setattr("monograph.plan.updates.schedule.overwrites", lambda *_args, **_options: {})

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x)[0].square().mean()
        loss.backward()
        return loss

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Hardswish(), nn.LSTM(4, 4, batch_first=True))

    with caplog.at_level(logging.INFO, "monograph"):
        compare(build, make, calls=lambda: list(torch.randn(3, 5, 6, 4)))
    assert "captured once more, on copies of the real tensors, which is normal" in caplog.text


@pytest.mark.parametrize("ask", [lambda y: y > 0, lambda y: (y > 0).item()], ids=["branch", "item"])
def test_a_trace_on_real_tensors_still_refuses_values_that_the_step_computes(ask):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = cube(x) * self.model.bias
        return y if ask(y.sum()) else -y

    with pytest.raises(mg.DataDependentError):
        graph(build, model=linear())(torch.ones(3))


def test_a_trace_on_real_tensors_reads_values_of_arguments():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = cube(x)
        return y if y.sum() > 0 else -y

    step = graph(build)
    for sign in (1.0, -1.0):
        assert_same(build(None, torch.full((2,), sign)), step(torch.full((2,), sign)))


# --- nothing is left behind ---------------------------------------------------------------------------------


def test_a_graph_can_be_freed():
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) is FakeTensor}
    model = linear()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    step(torch.ones(2, 4))
    gc.collect()
    left = [item for item in gc.get_objects() if type(item) is FakeTensor and id(item) not in before]
    assert not left, "fake tensors outlive the capture"
    build = weakref.ref(step.builds[0])
    del step
    gc.collect()
    assert build() is None


class Experts(nn.Module):
    """Two experts in one grouped matrix product, whose fake kernel takes only bfloat16 before torch 2.15."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x, ends):
        return self.head(nn.functional.grouped_mm(x, self.weight, offs=ends))


def refused_without_data() -> bool:
    x, weight = torch.empty(8, 16, device="meta"), torch.empty(2, 16, 32, device="meta")
    try:
        nn.functional.grouped_mm(x, weight, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return True
    return False


def test_an_op_that_its_fake_kernel_refuses(caplog, capfd):
    caplog.set_level("INFO", "monograph")
    torch.manual_seed(0)
    model = Experts()
    counterpart = copy.deepcopy(model)
    optimizer, twin_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, counterpart)
    )
    step = mg.train_graph(model, nn.MSELoss(), optimizer)
    for end in (3, 5, 1):
        x, ends, y = torch.randn(8, 16), torch.tensor([end, 8], dtype=torch.int32), torch.randn(8, 4)
        twin_optimizer.zero_grad()
        expected = nn.functional.mse_loss(counterpart(x, ends), y)
        expected.backward()
        twin_optimizer.step()
        assert_same(expected.detach(), step(x, ends, y).detach())
        assert_same(dict(counterpart.state_dict()), dict(model.state_dict()))
    assert len(step.builds) == 1
    assert ("captured on copies of the real tensors" in caplog.text) == refused_without_data()
    assert "Traceback" not in capfd.readouterr().err


class FixedExperts(Experts):
    """The groups end at a tensor that forward makes: its value must be known as well when the step is traced again."""

    def forward(self, x):
        return super().forward(x, torch.tensor([3, 8], dtype=torch.int32))


def test_an_op_that_its_fake_kernel_refuses_works_on_a_tensor_made_in_build():
    torch.manual_seed(0)
    model = FixedExperts()
    counterpart = copy.deepcopy(model)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        x, y = torch.randn(8, 16), torch.randn(8, 4)
        assert_same(nn.functional.mse_loss(counterpart(x), y).detach(), step(x, y).detach())
        counterpart.load_state_dict(model.state_dict())
    assert len(step.builds) == 1


class ChoosyExperts(Experts):
    """Has another fault behind the op that its fake kernel refuses."""

    def forward(self, x, ends):
        out = super().forward(x, ends)
        return out if out.sum() > 0 else -out


def test_the_fault_behind_an_op_that_its_fake_kernel_refuses_is_told():
    model = ChoosyExperts()
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    x, ends, y = torch.randn(8, 16), torch.tensor([3, 8], dtype=torch.int32), torch.randn(8, 4)
    with pytest.raises(mg.CaptureError) as caught:
        step(x, ends, y)
    assert "BF16" not in str(caught.value)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda x: torch.distributions.Beta(0.4, 0.4).sample((x.size(0), 1)),
        lambda x: torch.distributions.Dirichlet(torch.ones(3)).sample((x.size(0),)),
        lambda x: torch.distributions.Binomial(5, 0.3).sample((x.size(0), 1)),
    ],
    ids=["beta", "dirichlet", "binomial"],
)
def test_samples_that_torch_has_no_fake_of_are_drawn_for_any_size(drawn):
    step = mg.trace(lambda x: x * drawn(x))
    for rows in (8, 6, 5, 7):
        x = torch.ones(rows, 3)
        torch.manual_seed(rows)
        expected = x * drawn(x)
        torch.manual_seed(rows)
        assert torch.equal(step(x), expected)
    assert len(step.builds) == 2
