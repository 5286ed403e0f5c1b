"""The predicted time of ops, and what a curve gives for a share of the time of a step."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.ir.meta import TensorMeta, compute_nodes, set_value, value
from monograph.ir.program import Program
from monograph.recompute import cost
from monograph.recompute.problem import problem_of
from monograph.recompute.recompute import Recompute, peak_of
from monograph.recompute.schedule import Scheduler
from monograph.recompute.solve import searched
from tests.recompute.drawn import step_of


def program_of(seed: int) -> Program:
    return step_of(Random(seed), 12)


def test_ops_are_timed_once(monkeypatch):
    nodes = list(compute_nodes(program_of(1).graph))
    first = cost.seconds_of(nodes)
    monkeypatch.setattr(cost, "_least", None)  # no op is run again
    assert cost.seconds_of(nodes) == first
    assert all(item > 0 for item in first)


def test_what_is_on_meta_is_predicted_without_a_run(monkeypatch):
    program = program_of(2).rebuilt()
    cost.seconds_of(compute_nodes(program.graph))  # the speed of the machine is known
    for node in program.graph.nodes:
        if isinstance(described := value(node), TensorMeta):
            shape = tuple(10_000 * size for size in described.shape)
            meta = torch.empty(shape, device="meta")
            set_value(node, TensorMeta(shape, described.dtype, meta.stride(), meta.device))
    cost._per_byte()
    cost._per_flop(torch.float32)
    monkeypatch.setattr(cost, "_timed", None)
    found = cost.seconds_of(compute_nodes(program.graph))
    assert max(found) > 0.1


def test_timing_draws_none_of_the_random_numbers_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))  # nothing is timed yet

    def trained(capture: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.RReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
        step.config.enable_compress_memory()
        x, y = torch.randn(128, 64), torch.randint(10, (128,))
        if capture:
            step.memory(x, y)
            step(x, y)
        else:
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
        return [*model.parameters(), torch.get_rng_state()]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("seed", range(5))
def test_a_share_of_the_time_gives_the_least_peak_within_it(seed):
    problem = problem_of(program_of(seed))
    curve = searched(Scheduler(problem, [1.0] * len(problem.units)))
    assert curve.free(0.0).seconds == 0.0
    assert curve.free(1e9).peak == curve.least
    peaks = [curve.free(float(item)).peak for item in range(8)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(curve.free(float(item)).seconds <= item for item in range(8))


def test_the_pass_takes_what_is_free():
    program = program_of(3)
    assert peak_of(Recompute(free_share=100.0)(program)) < peak_of(program)
    assert peak_of(Recompute(free_share=0.0)(program)) <= peak_of(program)


def test_attention_runs_again_though_its_op_is_marked_as_random():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.given(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
            return F.scaled_dot_product_attention(*parts)

    model = Attention()
    step = mg.train_graph(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("aten")
    step(torch.randn(2, 5, 8), torch.randn(2, 2, 5, 4))
    units = problem_of(step.builds[0].plan.program).units
    assert [unit.stays for unit in units if "attention" in unit.node.name] == [True]


@pytest.mark.long
def test_compiled_steps_under_a_budget_train_as_without():
    def run(budget: str | None) -> mg.Graph:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)]
        model = nn.Sequential(*layers)
        step = mg.train_graph(model, F.mse_loss, torch.optim.AdamW(model.parameters()))
        step.config.backend("inductor")
        step.config.set_memory_budget(budget)
        return step

    x, y = torch.randn(256, 32), torch.randn(256, 32)
    plain, few = run(None), run("0.6x")
    for _ in range(3):
        torch.testing.assert_close(plain(x, y), few(x, y))
    assert few.builds[0].backend == "inductor"
    assert few.verify(x, y).ok
