"""GRU and RNN for compiled code are one op for each layer, which gives eager's bits where nothing compiles it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph import backends
from monograph.errors import BackendError
from monograph.ir.meta import TensorMeta, compute_nodes
from monograph.ir.ops.unrolled import UNROLLED_LAYER, UNROLLED_LAYER_BACKWARD
from monograph.ir.own_ops import RECURRENCE
from monograph.passes.inductor.recurrent import recurrent
from tests.artifact.test_malicious import edited
from tests.support import assert_same

CASES: dict[str, tuple[Callable[..., nn.RNNBase], dict[str, Any]]] = {
    "GRU": (nn.GRU, {}),
    "GRU, two layers both ways, dropout": (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.4}),
    "GRU, no biases": (nn.GRU, {"bias": False, "batch_first": True}),
    "RNN, both ways": (nn.RNN, {"bidirectional": True, "batch_first": True}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(order: Any) -> Any:
        raise BackendError("no C++ code can be compiled here")

    monkeypatch.setitem(backends.LOWER, "inductor", refusing)


class Step(mg.Graph):
    """A layer whose states and last state take part in the loss, from first states that are given or not."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., torch.Tensor], backend: str = "inductor", **options: Any
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options))
        self.config.backend(backend)

    def build(self, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
        """A step."""
        loss = self.loss(self.model, x, *first)
        loss.backward()
        return loss


def both(model: Any, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
    states, last = model(x, *first)
    return states.square().mean() + last.sin().mean()


def states_alone(model: Any, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
    return model(x, *first)[0].square().mean()


def last_alone(model: Any, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
    return model(x, *first)[1].square().mean()


def with_penalty(model: Any, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
    """Autograd adds the gradients of the weight's uses one by one."""
    return both(model, x, *first) + model.weight_hh_l0.square().sum()


def called_twice(model: Any, x: torch.Tensor, *first: torch.Tensor) -> torch.Tensor:
    return both(model, x, *first) + both(model, x.flip(0), *first)


def trained(step: Step, *args: torch.Tensor, eagerly: bool = False) -> Any:
    """The losses of some steps and the weights after them."""
    torch.manual_seed(1)
    losses = [(step.eager if eagerly else step)(*args).detach().clone() for _ in range(3)]
    return losses, copy.deepcopy(step.model.state_dict())


def made(case: str) -> tuple[nn.RNNBase, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    kind, options = CASES[case]
    layer = kind(3, 20, **options)
    ways = layer.num_layers * (1 + layer.bidirectional)
    x = torch.randn(5, 4, 3)
    return layer, x, torch.randn(ways, x.shape[0 if layer.batch_first else 1], 20)


def calls_of(step: Step, target: Any) -> int:
    return sum(node.target is target for node in compute_nodes(step.builds[0].program.graph))


@pytest.mark.every_case
@pytest.mark.parametrize("loss", [both, states_alone, last_alone])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_eagers(case: str, loss: Any) -> None:
    layer, x, first = made(case)
    expected = trained(Step(copy.deepcopy(layer), loss), x, first, eagerly=True)
    step = Step(layer, loss)
    assert_same(trained(step, x, first), expected)
    assert calls_of(step, UNROLLED_LAYER_BACKWARD) == layer.num_layers
    assert len(step.builds) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_what_the_pass_makes_of_it_is_near(case: str) -> None:
    layer, x, first = made(case)
    step = Step(layer, both)
    step(x, first)
    before = step.builds[0].plan.program
    after = recurrent(before)
    count = layer.num_layers * (1 + layer.bidirectional)
    assert sum(node.target is RECURRENCE for node in compute_nodes(after.graph)) == count
    described = [node.meta["value"] for node in before.graph.find_nodes(op="placeholder")]
    values = [torch.randn(item.shape) * 0.3 if isinstance(item, TensorMeta) else 0.1 for item in described]
    torch.manual_seed(2)
    wanted = before.module(*values)
    torch.manual_seed(2)
    for got, known in zip(after.module(*values), wanted, strict=True):
        torch.testing.assert_close(got, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [with_penalty, called_twice])
def test_gradients_of_several_uses_are_added_in_eagers_order(loss: Any) -> None:
    layer, x, first = made("GRU")
    expected = trained(Step(copy.deepcopy(layer), loss), x, first, eagerly=True)
    step = Step(layer, loss)
    assert_same(trained(step, x, first), expected)
    assert calls_of(step, UNROLLED_LAYER) == 0


def test_an_optimizer_may_add_to_gradients() -> None:
    layer, x, first = made("RNN, relu")
    step = Step(layer, both, momentum=0.9, nesterov=True, foreach=False)
    for _ in range(2):
        step(x, first)
    assert calls_of(step, UNROLLED_LAYER_BACKWARD) == layer.num_layers


def test_gradients_of_gradients_and_first_states() -> None:
    def loss(model: Any, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        begun = first.sin().requires_grad_()
        states, last = model(x, begun)
        (of_first,) = torch.autograd.grad(states.square().sum() + last.sum(), begun, create_graph=True)
        return states.mean() + of_first.square().mean()

    layer, x, first = made("RNN, both ways")
    expected = trained(Step(copy.deepcopy(layer), loss), x, first, eagerly=True)
    assert_same(trained(Step(layer, loss), x, first), expected)


def test_layers_that_are_written_out() -> None:
    """On the backends with eager's bits, in other types, and without a batch."""
    layer, x, first = made("GRU")
    aten = Step(copy.deepcopy(layer), both, "aten")
    aten(x, first)
    assert calls_of(aten, UNROLLED_LAYER) == 0
    for model, given in (
        (copy.deepcopy(layer).double(), (x.double(), first.double())),
        (copy.deepcopy(layer), (x[:, 0], first[:, 0])),
    ):
        step = Step(model, both)
        step(*given)
        assert calls_of(step, UNROLLED_LAYER) == (model is not layer and given[0].dim() == 2)


def test_an_artifact_holds_such_a_layer(tmp_path: Any) -> None:
    layer, x, first = made("GRU, two layers both ways, dropout")
    step = Step(layer.eval(), both)
    step(x, first)
    path = mg.save(step, tmp_path / "artifact")
    assert torch.equal(mg.load(path, backend="aten").train(x, first), step(x, first))

    def change(program: Any) -> None:
        for row in program["nodes"]:
            if "unrolled_layer" in row[1]:
                row[2] = json.loads(json.dumps(row[2]).replace('gru"', 'relu"'))  # which has fewer gates

    edited(path, change)
    with pytest.raises(mg.ArtifactError, match="unrolled_layer has arguments that do not fit: weights"):
        mg.load(path)


# --- sizes that vary, and the layout that torch gives ---------------------------------------------------------------


class Convolved(nn.Module):
    """Sequences that come out of a convolution: one alone is laid out by columns."""

    def __init__(self, kind: type[nn.RNNBase], *, both_ways: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, stride=2, padding=2)
        self.layer = kind(8, 10, batch_first=True, bidirectional=both_ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layer(self.conv(x.unsqueeze(1)).transpose(1, 2))[0]
        return states


@pytest.mark.every_case
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_each_size_has_the_bits_of_eager_mode(kind: type[nn.RNNBase], both_ways: bool) -> None:
    torch.manual_seed(0)
    model = Convolved(kind, both_ways=both_ways)
    plain = copy.deepcopy(model)
    step = mg.trace(lambda x: gradients_of(model, x))
    infer = mg.trace(lambda x: model(x))
    whole = mg.trace(lambda x: model.layer(x)[0])
    for rows, length in [(8, 40), (8, 32), (5, 22), (1, 40), (1, 28), (1, 24), (3, 28), (8, 40)]:
        x = torch.randn(rows, length)
        assert_same(gradients_of(plain, x), step(x), f"gradients of {rows} x {length}")
        with torch.no_grad():
            assert_same(plain(x), infer(x), f"{rows} x {length}")
            batch = torch.randn(rows, length, 8)
            assert_same(plain.layer(batch)[0], whole(batch), f"without a convolution, {rows} x {length}")


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).square().sum()
    return [*torch.autograd.grad(loss, list(model.parameters()))]
