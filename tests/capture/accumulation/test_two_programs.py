"""The two programs of gradient accumulation: what goes from micro-batch to micro-batch, and what is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from tests.capture.accumulation.loop import (
    Case,
    Odd,
    Scaled,
    Side,
    TrainStep,
    clipped,
    detached,
    make_batches,
    one_cycle,
    plain_loop,
)
from tests.support import assert_same


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["input", "update", "accumulate", "slice", "device", "micro_0", "größe"])
def test_arguments_of_any_name(name: str, steps: int) -> None:
    scope: dict[str, Any] = {}
    exec(
        f"def build(self, {name}):\n"
        f"    loss = self.model({name}).square().mean()\n"
        "    loss.backward()\n"
        f"    return loss, {name} * 2\n",
        scope,
    )
    step = type("Named", (Odd,), {"build": scope["build"]})(None)
    step.config.set_gradient_accumulation_steps(steps)
    x = torch.randn(4, 6)
    assert_same(x * 2, step(x)[1])
    exec(step.show(), {})


def test_gradients_are_returned_and_kept_as_sums() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        self.model(x).square().mean().backward()
        return self.model.weight.grad, self.model.bias.grad * 2

    for keep in (False, True):
        step = Odd(body)
        step.config.keep_gradients(keep)
        plain = copy.deepcopy(step.model.to(nn.Module))
        x = torch.randn(4, 6)
        for micro in x.chunk(2):
            (plain(micro).square().mean() / 2).backward()
        weight, bias = step(x)
        assert_same(plain.weight.grad, weight)
        assert_same(plain.bias.grad * 2, bias)
        if keep:
            assert_same(plain.weight.grad, step.model.weight.grad)
            assert_same(plain.bias.grad, step.model.bias.grad)
        else:
            assert step.model.weight.grad is None


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_kept_gradients_are_sums_of_one_call(eager: bool) -> None:
    """Without an automatic optimizer they would have to be added to: the user must clear them."""

    class Summed(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(6, 3)
            self.config.keep_gradients()
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    step = Summed()
    plain = copy.deepcopy(step.model.to(nn.Module))
    run = step.eager if eager else step
    for _ in range(2):
        x = torch.randn(4, 6)
        for micro in x.chunk(2):
            (plain(micro).square().mean() / 2).backward()
        run(x)
        assert_same(plain.weight.grad, step.model.weight.grad)
        with pytest.raises(mg.CaptureError, match=r"model\.weight has a gradient when the step begins"):
            run(x)
        assert_same(plain.weight.grad, step.model.weight.grad)
        plain.zero_grad()
        step.model.zero_grad()
    assert len(step.builds) == (0 if eager else 1)


def test_without_backward_results_are_joined() -> None:
    class Evaluated(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            with torch.no_grad():
                y = self.model(x)
                return y, y.mean(), y.t(), x, "text", None

    step, x = Evaluated(), torch.randn(4, 6)
    plain = copy.deepcopy(step.model.to(nn.Module))
    with torch.no_grad():
        parts = [plain(micro) for micro in x.chunk(2)]
    joined, means, turned, same, *rest = step(x)
    assert_same(torch.cat(parts), joined)
    assert_same(torch.stack([part.mean() for part in parts]), means)
    assert_same(torch.cat([part.t() for part in parts]), turned)
    assert same is x
    assert rest == ["text", None]
    assert_same(plain.state_dict(), step.model.state_dict())


@pytest.mark.every_case
@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_of_steps_is_refused(n: Any) -> None:
    with pytest.raises(mg.DefinitionError):
        Scaled().config.set_gradient_accumulation_steps(n)


def test_a_failure_in_a_later_micro_batch_undoes_the_step() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.table = nn.BatchNorm1d(6), nn.Embedding(5, 6)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.norm(self.table(index)), 0.5)

    class Looked(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = Checked()
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
            self.config.set_gradient_accumulation_steps(3)

        def build(self, index):
            loss = self.model(index).square().mean()
            loss.backward()
            return loss

    step = Looked()
    good = torch.randint(5, (6,))
    step(good)
    before = copy.deepcopy(step.state_dict())
    bad = good.clone()
    bad[5] = 99  # in the last micro-batch
    with pytest.raises(Exception, match="index out of range"):
        step(bad)
    assert_same(before, step.state_dict())
    step(good)
    assert len(step.builds) == 1


class CutShort(TorchDispatchMode):
    """Raises at op `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_a_step_cut_short_at_any_op_is_as_if_it_had_not_been() -> None:
    case = Case("cut", after=clipped, scaled=True, average=True, scheduler=one_cycle)
    expected = plain_loop(case)
    side = Side(case)
    step = TrainStep(case, side)
    batches = make_batches(case)
    torch.manual_seed(1)
    step(*batches[0])
    before = copy.deepcopy(step.state_dict())
    at, cuts = 0, 0
    while at < 10_000:
        try:
            with CutShort(at):
                returned = step(*batches[1])
            break
        except KeyboardInterrupt:
            assert_same(before, step.state_dict())
        at, cuts = at + 11, cuts + 1
    assert cuts > 20
    assert_same(expected[1]["returned"], detached(returned))
    assert_same(expected[1]["model"], side.state()["model"])
    assert_same(expected[1]["optimizer"], side.state()["optimizer"])


def test_the_text_shows_both_programs() -> None:
    step = Scaled(2)
    step({"x": torch.randn(4, 6)})
    text = step.show()
    assert text.index("def accumulate(") < text.index("def update(") < text.index("def train_step(")
    scope: dict[str, Any] = {}
    exec(text, scope)
    x = torch.randn(4, 6)
    known = dict(step.model.named_parameters())
    inputs = {"model.weight": known["weight"], "model.bias": known["bias"], 'batch["x"]': x, "scale": 1.0}
    ports = step.builds[0].program.inputs
    with torch.no_grad():
        outputs = scope["train_step"](*[inputs.get(port.path, 0.1) for port in ports])
    assert_same(outputs[0], step({"x": x}).detach())
    assert "OPERATOR" in repr(step)
    assert "accumulation_steps=2" in repr(step)
    assert step.explain()
