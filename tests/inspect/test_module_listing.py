"""show(module=...): what belongs to one module, as Python that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x)).relu()


@pytest.fixture(scope="module")
def step() -> mg.Graph:
    model = nn.ModuleDict({"blocks": nn.Sequential(Block(), Block()), "head": nn.Linear(4, 2)})

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x: Tensor) -> Tensor:
            loss = self.model["head"](self.model["blocks"](x)).sum()
            loss.backward()
            return loss

    made = Step()
    made.compile(mg.spec((3, 4)))
    return made


def function_of(text: str, name: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return names[name]


def test_it_runs(step: mg.Graph) -> None:
    text = step.show("capture", module="model.blocks.1.fc")
    weight, bias, given, gradient = (torch.randn(shape) for shape in ((4, 4), (4,), (3, 4), (3, 4)))
    inputs = [
        line.split(",")[0].strip() for line in text.partition("(\n")[2].partition("\n):")[0].splitlines()
    ]
    assert inputs[:2] == ["model_blocks_1_fc_weight", "model_blocks_1_fc_bias"]
    assert len(inputs) == 4
    found = function_of(text, "model_blocks_1_fc")(weight, bias, given, gradient)
    expected = (nn.functional.linear(given, weight, bias), gradient @ weight, gradient.T @ given)
    for item in expected:
        assert any(item.shape == other.shape and torch.allclose(item, other) for other in found)


def test_the_ops_of_a_module_and_of_those_inside(step: mg.Graph) -> None:
    def ops(text: str, module: str) -> list[str]:
        lines = (line for line in text.splitlines() if " = " in line and line.startswith("    "))
        return [line.partition(" = ")[0] for line in lines if f"  {module}" in line]

    listed = step.show(module="model.blocks.1")
    assert ops(listed, "") == ops(step.show(), "model.blocks.1")
    assert ops(listed, "model.blocks.1.norm")
    assert "backward" in listed
    assert "model.blocks.0.fc.weight" not in listed


def test_each_part_of_a_step_is_a_function() -> None:
    model = nn.Linear(4, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.set_gradient_accumulation_steps(2)
    step.compile(mg.spec((4, 4)), mg.spec((4, 2)))
    assert "def model(" in step.show(module="model")


def test_branches_are_shown() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    class Infer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.branches = Branches()

        def build(self, x: Tensor) -> Tensor:
            return self.branches(x + 1) * 2

    step = Infer()
    step.compile(mg.spec((3,)))
    run = function_of(step.show(module="branches"), "branches")
    assert torch.equal(run(torch.ones(3))[0], torch.ones(3).sin())
    assert torch.equal(run(-torch.ones(3))[0], torch.ones(3).cos())


@pytest.mark.parametrize(
    ("module", "near"),
    [("blocks.1", "model.blocks.1, model.blocks.1.fc"), ("model.block.7", "model.blocks")],
)
def test_an_unknown_module(step: mg.Graph, module: str, near: str) -> None:
    with pytest.raises(mg.MonographError, match=f"no op belongs to the module '{module}'") as caught:
        step.show(module=module)
    assert f"modules near it: {near}" in caught.value.hint
