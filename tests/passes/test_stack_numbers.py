"""Numbers of all parameters as one row: fewer ops, the same results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.passes.inductor.foreach_to_single import foreach_to_single
from monograph.passes.inductor.scalars_to_tensors import scalars_to_tensors
from monograph.passes.inductor.stack_numbers import stack_numbers
from monograph.passes.run import Stage, run_passes

aten = torch.ops.aten


def stages_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, micro_batches: int = 1
) -> tuple[Program, Program, list[torch.Tensor]]:
    """A step with its numbers as tensors, before and after the pass, and its inputs."""
    graph = mg.train_graph(model, nn.functional.mse_loss, optimizer)
    graph.config.set_gradient_accumulation_steps(micro_batches)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    graph.compile(x, y)
    build = graph.builds[0]
    first = Stage("plan", build.plan.program, 0.0)
    stages = run_passes(first, (foreach_to_single, scalars_to_tensors, stack_numbers))
    inputs = build.executor.bind([x, y])
    tensors = [
        item if isinstance(item, torch.Tensor) else torch.tensor(item, dtype=torch.float64) for item in inputs
    ]
    return stages[-2].program, stages[-1].program, tensors


def calls(program: Program, target: object) -> int:
    """How often an op is called."""
    return sum(node.target is target for node in program.graph.nodes)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
def test_powers_of_all_parameters_are_one_op_each(kind, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    before, after, inputs = stages_of(kind(model.parameters(), lr=0.1, foreach=foreach), model)
    assert calls(before, aten.pow.Tensor_Tensor) == 4 * calls(after, aten.pow.Tensor_Tensor) > 0
    inputs = [  # parameters that have not made the same steps
        item * (1 + index / 100) if item.dtype is torch.float32 and not item.dim() else item
        for index, item in enumerate(inputs)
    ]
    expected, got = before.module(*inputs), after.module(*inputs)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_step_without_counters_stays_as_it_is():
    model = nn.Linear(3, 2)
    before, after, _ = stages_of(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    assert after is before


def test_numbers_of_the_update_after_micro_batches():
    """The update is a part of its own there, and the counters of ASGD are inputs of it."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before, after, _ = stages_of(torch.optim.ASGD(model.parameters(), lr=0.1), model, micro_batches=2)
    (one,), (other,) = before.parts[1:], after.parts[1:]
    assert calls(other, aten.stack.default) > calls(one, aten.stack.default) == 0
    verify(after, after="the test")
