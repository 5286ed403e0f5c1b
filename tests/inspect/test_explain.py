"""explain() and assert_max_builds(): why builds exist, and how many may."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.inspect.faults import Step, batch
from tests.support.steps import line_of


def scaled(gradient: Tensor) -> Tensor:
    return gradient * 2


def noted(module: nn.Module, inputs: object, output: Tensor) -> None:
    pass


def test_hooks_are_listed() -> None:
    step = Step()
    step.model.head.to(nn.Module).register_forward_hook(noted)
    step.model.head.weight.register_hook(scaled)
    step(*batch())
    text = step.explain()
    assert "hooks:" in text
    assert "model.head: forward hook noted" in text
    assert "model.head.weight: gradient hook scaled" in text
    plain = Step()
    plain(*batch())
    assert "hooks:" not in plain.explain()


def scaled_by(
    x: Tensor, times: int, factor: float, parts: dict[str, object], *, mode: str, bias: None = None
) -> Tensor:
    return x * times * factor if mode == "up" else x


def test_arguments_that_are_constants_of_a_build_are_guards() -> None:
    step = mg.trace(scaled_by)
    for times in (2, 3):
        step(torch.ones(2), times, 0.5, {"deep": [True]}, mode="up")
    _, first, second = step.explain().split("\nbuild ")
    lines = {line.strip() for line in first.splitlines()}
    assert [line for line in lines if line.startswith("argument times")] == ["argument times = 2"]
    assert lines >= {
        "argument mode = 'up'",
        'argument parts["deep"][0] = True',
    }
    _, _, others = second.partition("guards, the same as of build 0 but for:\n")
    assert "    without argument times = 2" in others.splitlines()  # it moves from 3 on
    assert "argument mode" not in others
    assert not any(f"argument {name} =" in first + second for name in ("x", "factor"))  # they move


@pytest.mark.long
def test_what_a_compiled_step_leaves_to_torch_is_listed() -> None:
    step = Step(compiled=True)
    step(*batch())
    assert "left to torch's own kernels: " in step.explain()
    assert "bernoulli" in step.explain()


def test_one_build_too_many_is_an_error_that_tells_why() -> None:
    step, (x, y) = Step(), batch()
    with mg.assert_max_builds(1):
        step(x, y)
        step(x, y)
        with pytest.raises(mg.CaptureError, match=r"more than 1 build:.*first call.*x.*\(3, 8\)"):
            step(x[:3], y[:3])
    step(x[:3], y[:3])
    assert len(step.builds) == 2


def test_limits_count_all_graphs_and_nest() -> None:
    one, other = mg.trace(torch.sin), mg.trace(torch.cos)
    with mg.assert_max_builds(3):
        one(torch.ones(1))
        with mg.assert_max_builds(0):
            one(torch.ones(1))
            with pytest.raises(mg.CaptureError, match="more than 0"):
                other(torch.ones(1))
    with pytest.raises(mg.DefinitionError, match="assert_max_builds"), mg.assert_max_builds(-1):
        pass


def test_what_builds_cost_is_a_table() -> None:
    step, (x, y) = Step(), batch()
    for rows in (5, 5, 3, 5):
        step(x[:rows], y[:rows])
    with pytest.raises(mg.MonographError):
        step(x[:, :3], y)  # no step
    step.many(torch.stack([x[:5]] * 6), torch.stack([y[:5]] * 6))
    title, heading, *rows = str(step.explain()).partition("\nbuild 0")[0].splitlines()
    assert title.endswith(": 2 build(s)")
    assert heading.split() == ["build", "steps", "capture", "compile", "memory", "reason"]
    steps = {row.split()[0]: int(row.split()[1]) for row in rows}
    assert sum(steps.values()) == 10
    assert rows[0].endswith("first call")
    assert "argument" in rows[1]
    for row, build in zip(rows, step.builds, strict=True):
        assert f"{build.stages[0].seconds:.2f} s" in row
        assert 0 < build.stages[0].seconds < build.seconds
        assert "KiB" in row


def test_the_default_says_when_it_compiles() -> None:
    model = nn.Linear(4, 4)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    step.config.backend("auto")
    step(torch.ones(2, 4), torch.ones(2, 4))
    assert "code to come for build 0: exact compiles it once its steps have taken" in str(step.explain())


class Kept(mg.Graph):
    """A step that keeps its loss."""

    def __init__(self, scale: Callable[[float], float]) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.log: list[float] = []
        self.scale = scale

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        self.log.append(self.scale(loss.item()))  # at: kept
        loss.backward()
        return loss


@pytest.mark.parametrize(
    "scale", [lambda value: value, lambda value: 0.9 + value / 8, lambda value: -2 * value]
)
def test_a_loss_that_is_kept_costs_nothing(scale: Callable[[float], float]) -> None:
    graph = Kept(scale)
    graph.config.backend("aten")
    graph(torch.ones(2, 4))
    assert len(graph.builds[0].order().in_place) == 8  # two parameters, two moments and a count of each
    assert graph.builds[0].memory.peak_bytes < graph.builds[0].plan.memory.peak_bytes
    assert "costs:" not in graph.explain()


@pytest.mark.parametrize(
    "scale", [lambda value: math.exp(value), lambda value: 1 / value, lambda value: value**2]
)
def test_a_number_that_may_fail_is_named_with_its_line(scale: Callable[[float], float]) -> None:
    graph = Kept(scale)
    graph.config.backend("aten")
    graph(torch.ones(2, 4))
    assert not graph.builds[0].order().in_place
    for text in (graph.explain(), graph.profile(torch.ones(2, 4))):
        said = " ".join(str(text).split())
        assert f"test_explain.py:{line_of('kept', __file__)}: build() computes graph.log[" in said
        assert "no update is compiled or in place. Return the tensor" in said


def test_guards_come_last_and_options_share_lines() -> None:
    model = nn.Linear(4, 4)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    step(torch.ones(2, 4), torch.ones(2, 4))
    titles = [
        line for line in str(step.explain()).splitlines() if line.startswith("  ") and line.endswith(":")
    ]
    assert titles[-1] == "  guards:"
    _, _, guards = str(step.explain()).partition("  guards:\n")
    assert "optimizer.0.defaults: lr = 0.001, betas = (0.9, 0.999)" in guards
    assert "optimizer.0/group0: amsgrad = False" in guards
    assert len(guards.splitlines()) < 20


def test_guards_of_further_builds_are_those_that_differ() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Dropout(0.1) for _ in range(4)))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(2, 4), torch.ones(2, 4))
    model.eval()
    step(torch.ones(2, 4), torch.ones(2, 4))
    _, first, second = str(step.explain()).split("\nbuild ")
    _, _, guards = first.partition("  guards:\n")
    assert len(guards.splitlines()) > 5
    _, _, others = second.partition("  guards, the same as of build 0 but for:\n")
    (line,) = [line for line in others.splitlines() if line.startswith("    ")]
    assert line.startswith("    training = False in 4 modules: model.1, model.2, ")


def test_advice_stands_once() -> None:
    step = Step()
    step.config.dynamic(False)
    x, y = batch()
    for rows in (4, 3, 2):
        step(x[:rows], y[:rows])
    text = str(step.explain())
    assert text.count("mg.buckets(") == 2  # of one line, for x and y
    assert text.count("  advice:\n    that of build 1\n") == 1


def test_a_limit_counts_builds_and_the_log_numbers_them(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    step.config.dynamic(False)
    step(*batch())
    step.config.max_builds(2)
    x, y = batch()
    step(x[:3], y[:3])
    assert "build 1:" in caplog.text
    with pytest.raises(mg.CaptureError, match=r"Step_[0-9]+ has 2 builds and would need another: "):
        step(x[:4], y[:4])
