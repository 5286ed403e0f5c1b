"""What is right is said to be right, what is not finite to be not finite, and nothing is left changed."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monograph as mg
from monograph.numerics.judge import digests

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> mg.Graph:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)


# --- verify ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_tied_weights_are_judged_as_one() -> None:
    torch.manual_seed(0)
    graph = train(Tied())
    graph.config.allow_fuse_add_to_output()
    graph.config.add_pass(one_unit_more, after="add_to_output")
    report = graph.verify(X, Y)
    paths = [item.path for item in report.compared]
    assert "model.first.weight" in paths
    assert "model.last.weight" not in paths
    assert not all(item.same for item in report.compared), "the bits have to be others, or nothing is shown"
    assert report.ok, str(report)


def one_unit_more(program: Any) -> Any:
    """tanh(x) becomes the next or the next but one larger number."""
    (node,) = [item for item in program.graph.nodes if item.target is torch.ops.aten.tanh.default]
    with program.graph.inserting_after(node):
        larger = program.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1 + 2**-23))
    larger.meta = dict(node.meta)
    node.replace_all_uses_with(larger, delete_user_cb=lambda user: user is not larger)
    return program


def test_a_generator_of_the_graph() -> None:
    class Noise(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def build(self, x: Tensor) -> Tensor:
            return x + torch.rand(3, generator=self.generator)

    graph = Noise()
    before = graph.generator.get_state()
    assert graph.verify(torch.ones(3), steps=2).ok
    assert torch.equal(before, graph.generator.get_state())
    walk = graph.replay(torch.ones(3))
    walk.run()
    assert torch.equal(walk.value("result.0"), graph(torch.ones(3)))


def test_an_optimizer_that_needs_several_builds() -> None:
    model = nn.Linear(4, 3)
    report = train(model, torch.optim.RAdam(model.parameters())).verify(X, Y, steps=7)
    assert report.ok, str(report)


def test_a_tensor_that_a_module_keeps() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.fc(x).detach()
            return self.fc(x)

    graph = train(Keeps())
    assert graph.verify(X, Y, steps=2).ok
    graph(X, Y)
    report = graph.verify(X, Y, steps=2)
    assert report.ok, str(report)


def test_a_scaler_whose_first_steps_overflow() -> None:
    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 3)
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**120))

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.model(x), y) * 1e5
            loss.backward()
            return loss

    report = Scaled().verify(X, Y, steps=2)
    assert report.ok, str(report)


def test_random_numbers_of_numpy_are_compared() -> None:
    graph = mg.trace(lambda x: x * np.random.rand())
    state = np.random.get_state(legacy=True)
    assert graph.verify(torch.ones(2)).ok
    assert np.array_equal(np.random.get_state(legacy=True)[1], state[1])


def test_results_that_are_no_tensors() -> None:
    class Plain:
        pass

    thing, table = Plain(), np.arange(3)
    graph = mg.trace(lambda x: (x, thing, table, complex("nan")))
    assert graph.verify(torch.ones(2)).ok


def test_tensors_in_a_deque_are_put_back() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.queue = nn.Linear(4, 3), deque([torch.zeros(())])

        def forward(self, x: Tensor) -> Tensor:
            self.queue[0].add_(1)
            return self.fc(x)

    model = Queue()
    graph = train(model)
    graph(X, Y)
    before = model.queue[0].clone()
    graph.verify(X, Y)
    assert torch.equal(model.queue[0], before)


def test_tensors_in_objects_of_the_user_are_put_back() -> None:
    class Count:
        def __init__(self) -> None:
            self.number = torch.zeros(())

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.count = nn.Linear(4, 3), Count()

        def forward(self, x: Tensor) -> Tensor:
            self.count.number.add_(1)
            return self.fc(x) * self.count.number

    model = Counting()
    graph = train(model)
    graph(X, Y)
    report = graph.verify(X, Y, steps=2)
    assert report.ok, str(report)
    assert model.count.number == 1


class Own(torch.optim.Optimizer):
    """Keeps tensors in lists, and a tensor and a list in attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.table: dict[str, Tensor] = {"number": torch.zeros(())}
        self.calls: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            buffers = self.state[parameter].setdefault("buffers", [torch.zeros_like(parameter)])
            buffers[0].add_(parameter.grad)
            parameter.add_(buffers[0], alpha=-0.1)
        self.table["number"].add_(1)
        self.calls.append(1)


def test_an_optimizer_with_attributes_and_lists_is_left_alone() -> None:
    model = nn.Linear(4, 3)
    optimizer = Own(model.parameters())
    graph = train(model, optimizer)
    for _ in range(2):
        assert graph.verify(X, Y).ok
        graph.find_nonfinite(X, Y)
    assert optimizer.table["number"] == 0
    assert optimizer.calls == []
    assert not optimizer.state
    for _ in range(3):
        graph(X, Y)
    assert optimizer.table["number"] == 3
    assert optimizer.calls == [1, 1, 1]  # as in eager mode, at the price of a build for each length


# --- find_nonfinite and detect_nonfinite -----------------------------------------------------------------------------


class Masked(mg.Graph):
    """A loss that is infinite if the mask hides a target."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.detect_nonfinite()

    def build(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x).masked_fill(mask, float("-inf")), y)
        loss.backward()
        return loss


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_a_mask_makes_infinite(micro_batches: int) -> None:
    graph = Masked()
    graph.config.set_gradient_accumulation_steps(micro_batches)
    mask = torch.zeros(8, 3, dtype=torch.bool)
    assert graph.find_nonfinite(X, mask, Y).ok
    mask[0, Y[0]] = True
    report = graph.find_nonfinite(X, mask, Y)
    assert not report.ok
    assert report.found is not None
    assert "masked_fill" in report.found.op or "where" in report.found.op
    before = digests(graph.state_dict())
    with pytest.raises(mg.NonfiniteError, match="the first Inf is made by"):
        graph(X, mask, Y)
    assert digests(graph.state_dict()) == before


def test_an_infinity_that_comes_in() -> None:
    report = mg.trace(lambda x: x.abs().sum()).find_nonfinite(torch.tensor([1.0, float("inf")]))
    assert not report.ok
    assert "came in with x" in str(report)


def test_an_infinity_of_the_batch_that_becomes_a_nan() -> None:
    graph = train(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    x = X.clone()
    x[0, 0] = float("inf")
    text = str(graph.find_nonfinite(x, Y))
    assert "the first NaN is made by aten" in text
    assert "an Inf came in with batch[0]: f32[8, 4]" in text
    assert "came in" not in str(graph.find_nonfinite(X, Y))


def test_state_that_was_bad_before() -> None:
    model = nn.Linear(4, 3)
    graph = train(model)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    text = str(graph.find_nonfinite(X, Y))
    assert "came in with model.weight" in text
    assert "config.detect_nonfinite() stops at the step" in text


def test_a_probe_of_a_mask_is_no_alarm() -> None:
    graph = mg.trace(lambda x: torch.softmax(mg.probe("logits", x.masked_fill(x > 0, float("-inf"))), -1))
    assert graph.find_nonfinite(torch.tensor([[1.0, -1.0], [-2.0, 2.0]])).ok


# --- replay ----------------------------------------------------------------------------------------------------------


def test_gradients_belong_to_their_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            first = self.fc(x)
            first.retain_grad()
            self.fc_of_it = second = self.fc(first.relu())
            second.retain_grad()
            self.kept = (first, second)
            return second

    model = Twice()
    loss = F.mse_loss(model(X), X)
    loss.backward()
    first, second = model.kept
    expected, gradients = [first.detach(), second.detach()], [first.grad, second.grad]
    model.zero_grad()
    del model.kept, model.fc_of_it
    graph = mg.train_graph(nn.Sequential(model), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    walk = graph.replay(X, X)
    walk.run()
    for call in (0, 1, -1):
        assert torch.equal(walk.value("model.0.fc", call=call), expected[call])
        assert torch.equal(walk.grad_of("model.0.fc", call=call), gradients[call])
    with pytest.raises(mg.DefinitionError, match="has no call 5"):
        walk.value("model.0.fc", call=5)


def test_the_gradient_of_a_parameter_under_accumulation() -> None:
    model = nn.Linear(4, 3)
    graph = train(model)
    graph.config.set_gradient_accumulation_steps(2)
    graph.config.keep_gradients()
    walk = graph.replay(X, Y)
    walk.run()
    graph(X, Y)
    assert torch.equal(walk.grad_of("model.weight"), model.weight.grad)


# --- probes ----------------------------------------------------------------------------------------------------------


class Probed(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        out = mg.probe("out", self.model(x))
        mg.probe("out", out * 2)
        loss = F.cross_entropy(out, y)
        loss.backward()
        return loss


def test_eager_steps_record_as_the_graph_does() -> None:
    graph, other = Probed(), Probed()
    other.model.load_state_dict(graph.model.state_dict())
    for side in (graph, other):
        side.config.set_gradient_accumulation_steps(2)
    graph(X, Y)
    other.eager(X, Y)
    seen, expected = graph.probes(), other.probes()
    assert seen.keys() == expected.keys() == {"out", "out#1"}
    for name in seen:
        for what, values in seen[name].statistics.items():
            assert torch.equal(values, expected[name].statistics[what]), (name, what)


def test_rows_of_different_lengths() -> None:
    graph = Probed()
    for steps in (2, 4):
        graph.config.set_gradient_accumulation_steps(steps)
        graph(X, Y)
    means = graph.probes()["out"].statistics["mean"]
    assert means.shape == (2, 4)
    assert means[0, 2:].isnan().all()
    assert "nan" not in str(graph.probes())


def test_a_return_to_an_earlier_step_forgets_later_ones() -> None:
    graph = Probed()
    for _ in range(2):
        graph(X, Y)
    state = graph.state_dict()
    for _ in range(3):
        graph(X, Y)
    graph.load_state_dict(state)
    graph(X, Y)
    assert graph.probes()["out"].steps == [0, 1, 2]


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_capture_that_fails_is_no_build() -> None:
    with mg.assert_max_builds(1):
        graph = mg.trace(lambda x: x @ x)
        with pytest.raises(mg.MonographError):
            graph(torch.ones(2, 3))
        graph(torch.ones(2, 2))


def test_looking_changes_no_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    graph = train(model)
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)[1]]
    graph.verify(X, Y)
    graph.find_nonfinite(X, Y)
    graph.profile(X, Y)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state(legacy=True)[1], states[2])


class Rebinds(nn.Module):
    """Leaves what it made in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        global LEFT
        LEFT = self.fc(x)
        return LEFT


def test_a_global_holds_no_tensor_of_a_trace() -> None:
    graph = train(Rebinds())
    with torch.no_grad():
        expected = graph.model.fc(X)
    graph(X, Y)
    left = globals()["LEFT"]
    assert torch.equal(left, expected)  # what eager mode leaves there
    assert graph.verify(X, Y).ok
    assert globals()["LEFT"] is left
