"""Arguments that lie on state, on gradients and in artifacts: eager's numbers, or an error that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.ir.call.layouts import Step, add_to_first, numbers, only_read, train
from tests.support import assert_same

# --- arguments on state -------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Two buffers side by side, the first of which counts."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.register_buffer("count", memory[:4])
        self.register_buffer("other", memory[4:])
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize("first", [False, True])
def test_an_argument_on_a_buffer_that_changes(first):
    model = Counting()
    step = Step(lambda self, x: self.model(x), model=model)
    if first:
        step(torch.ones(4))
    for view in (model.count.view(4), model.count.as_strided((4,), (1,), 2), model.count.view(torch.int32)):
        with pytest.raises(mg.AliasError, match=r"argument .*model\.count"):
            step(view)
    before = model.count.clone()
    assert_same(model.other + before + 1, step(model.other[:]))  # beside it
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("first", [False, True])
def test_an_argument_on_what_the_step_puts_another_tensor_in_the_place_of(first):
    model, plain = Counting(), Counting()
    model.again = plain.again = True
    step = Step(lambda self, x: self.model(x), model=model)
    if first:
        assert_same(plain(torch.ones(4)), step(torch.ones(4)))
    for look in (lambda count: count.view(4), lambda count: count.view(torch.int32), lambda count: count):
        mine, theirs = look(model.count), look(plain.count)
        assert_same(plain(theirs), step(mine))
        assert_same(theirs, mine)  # as it was
        assert_same(plain.count, model.count)


def test_an_argument_on_state_that_is_only_read():
    model = nn.Linear(4, 3)
    step = Step(lambda self, x: self.model(x), model=model)
    with torch.no_grad():
        for x in (torch.ones(2, 4), model.weight.detach()[:2], model.weight.detach()[1:]):
            assert_same(model(x), step(x))
        assert len(step.builds) == 1
        assert_same(model(model.weight), step(model.weight))


def test_an_argument_changed_on_state_that_is_read():
    model = nn.Linear(4, 3).requires_grad_(False)

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.model(x)

    step = Step(body, model=model)
    step(torch.ones(1, 4))
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        step(model.weight[:1])


def test_an_argument_that_is_one_of_two_parameters_on_one_storage():
    flat = torch.randn(8)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    step = Step(lambda self, x: (x * 2, x is self.model[0], x is self.model[1]), model=model)
    with torch.no_grad():
        for x in (model[0], model[0].view(4), model[1], model[1].detach(), model[0]):
            assert_same((x * 2, x is model[0], x is model[1]), step(x))


@pytest.mark.parametrize("state", [False, True])
def test_an_argument_on_what_the_optimizer_updates(state):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = Step(lambda self, x, y: train(self.model, x, y), optimizer, model=model)
    step(torch.ones(3, 4), torch.ones(3, 3))
    held = optimizer.state[model.weight]["momentum_buffer"] if state else model.weight.detach()
    for view in (held[:], held.clone()):
        if view.data_ptr() == held.data_ptr():
            with pytest.raises(mg.AliasError, match="argument args"):
                step(view, torch.ones(3, 3))
        else:
            step(view, torch.ones(3, 3))
    assert len(step.builds) == 1


# --- gradients ----------------------------------------------------------------------------------------------


def differentiate(_self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (x * x * y + x).sum().backward()
    return y * 2


def test_an_argument_that_is_the_gradient_of_another():
    def leaf() -> torch.Tensor:
        x = numbers(4).requires_grad_()
        x.grad = torch.ones(4)
        return x

    step = Step(differentiate)
    mine, plain = leaf(), leaf()
    assert_same(differentiate(None, plain, numbers(4)), step(mine, numbers(4)))
    assert_same(plain.grad, mine.grad)
    for view in (mine.grad, mine.grad[:]):
        with pytest.raises(mg.AliasError, match="gradient of argument"):
            step(mine, view)
    assert_same(plain.grad, mine.grad)


def test_two_arguments_with_gradients_on_one_memory():
    def both(_self: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (x * 2 + y).sum().backward()

    grad = torch.zeros(8)
    x, y = (numbers(4).requires_grad_() for _ in range(2))
    x.grad, y.grad = grad[:4], grad[4:]
    step = Step(both)
    step(x, y)
    assert_same(torch.tensor([2.0] * 4 + [1.0] * 4), grad)
    y.grad = grad[2:6]
    with pytest.raises(mg.AliasError, match="the gradient of argument"):
        step(x, y)


def test_an_argument_whose_gradient_is_asked_for():
    def body(_self: Any, x: torch.Tensor) -> torch.Tensor:
        (x * x).sum().backward()
        return x.grad * 1

    step, x, plain = Step(body), numbers(4).requires_grad_(), numbers(4).requires_grad_()
    assert_same(body(None, plain), step(x))
    with pytest.raises(mg.CaptureError, match="has one from before the step"):
        step(x)
    assert_same(plain.grad, x.grad)
    x.grad = plain.grad = None
    assert_same(body(None, plain), step(x))
    assert len(step.builds) == 1


def test_an_argument_that_is_the_gradient_of_a_parameter():
    model = nn.Linear(4, 3)
    kept = Step(lambda self, x, y: train(self.model, x, y), model=model)
    kept.config.keep_gradients()
    x, y = torch.ones(3, 4), torch.ones(3, 3)
    kept(x, y)
    kept(x, y)
    assert model.weight.grad is not None
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        kept(model.weight.grad, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    free = Step(lambda self, x, y: train(self.model, x, y), optimizer, model=model)  # gradients of its own
    before = model.weight.grad.clone()
    expected = (model(before) - y).square().mean().detach()
    assert_same(expected, free(model.weight.grad, y).detach())
    assert_same(before, model.weight.grad)


@pytest.mark.parametrize("shares", [False, True])
def test_arguments_that_require_gradients_on_one_buffer(shares):
    def run(step: Any) -> list[torch.Tensor]:
        buffer = numbers()
        found = []
        for second in (4, 8, 2 if shares else 12):
            x = buffer[:4].detach().requires_grad_()
            y = buffer[second : second + 4].detach().requires_grad_()
            step(x, y)
            found += [x.grad, y.grad]
        return found

    def both(_self: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (x * x * y).sum().backward()

    step = Step(both)
    assert_same(run(lambda x, y: both(None, x, y)), run(step))
    assert len(step.builds) == 1


# --- gradient accumulation ----------------------------------------------------------------------------------


def test_micro_batches_of_one_buffer():
    def body(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return train(self.model, x, y)

    model = nn.Linear(4, 4)
    step = Step(body, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    step.config.set_gradient_accumulation_steps(2)
    data = torch.randn(16, 4)
    right = data.clone()
    right[:4] *= 2
    step(data[:4], data[4:8])
    assert_same(right, data)
    for x, y in ((data[:4], data[2:6]), (data[4:8], data[3:7])):
        with pytest.raises(mg.AliasError, match="share memory"):
            step(x, y)
    assert_same(right, data)
    step(data[8:12], data[4:8])
    right[8:12] *= 2
    assert_same(right, data)
    assert len(step.builds) == 1
    with pytest.raises(mg.AliasError, match="more than once"):
        step(data[:1].expand(4, 4), data[4:8])


def test_a_whole_argument_over_a_batch():
    def body(self: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return train(self.model, x + table, x)

    model = nn.Linear(4, 4)
    step = Step(body, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    step.config.set_gradient_accumulation_steps(2)
    data = torch.randn(16, 4)
    for start in (0, 2, 8):
        step(data[start : start + 4], mg.replicated(data[2:3]))
    assert len(step.builds) == 1
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        step(data[:4], mg.replicated(model.weight.detach()[:1]))


# --- artifacts ----------------------------------------------------------------------------------------------


def test_an_artifact_is_called_with_arguments_that_overlap(tmp_path):
    graph = Step(add_to_first)
    graph(numbers(4), numbers(4))
    mg.save(graph, tmp_path / "artifact")
    artifact, buffer, plain = mg.load(tmp_path / "artifact"), numbers(), numbers()
    assert_same(
        add_to_first(None, plain[:4], plain[4:8]), artifact(buffer[4:8] * 0 + buffer[:4], buffer[4:8])
    )
    for first, second in ((buffer[:4], buffer[2:6]), (buffer[2:6], buffer[:4]), (buffer[:4], buffer[:4])):
        with pytest.raises(mg.SignatureError, match="shares memory"):
            artifact(first, second)
    assert_same(numbers(), buffer)


def test_an_artifact_for_one_tensor_given_twice(tmp_path):
    graph, x = Step(only_read), numbers(4)
    graph(x, x)
    mg.save(graph, tmp_path / "one")
    artifact = mg.load(tmp_path / "one")
    assert_same(x * 9, artifact(*[x * 3] * 2))
    with pytest.raises(mg.SignatureError, match="was one tensor with another"):
        artifact(x, x + 1)
    graph(x, x + 1)
    mg.save(graph, tmp_path / "two")
    assert_same(only_read(None, x, x + 2), mg.load(tmp_path / "two")(x, x + 2))


def test_programs_that_an_artifact_could_not_choose_between(tmp_path):
    graph, x = Step(lambda _self, a, b, c: a * 4 + b * 2 + c), numbers(4)
    graph(x, x + 1, x)
    with pytest.raises(mg.ArtifactError, match="one tensor as two arguments"):
        mg.save(graph, tmp_path / "artifact")
    table = torch.ones(4)
    graph = Step(lambda _self, a: a + table)
    graph(table)
    with pytest.raises(mg.ArtifactError, match="state as an argument"):
        mg.save(graph, tmp_path / "artifact")
