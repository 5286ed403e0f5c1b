"""What a compiled step is said to hold is what torch's allocator counts while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.backends.held import held_by
from monograph.compat.inductor.written import memory_lines
from monograph.compat.inductor.written.memory_lines import Stretch, Taken
from monograph.plan.memory import Moment
from tests.plan.test_memory import adamw, allocated_peak, convolutions, language, mlp, momentum
from tests.support import new_cache


def compiled(
    make: Callable[[], Any] = mlp, optimizer: Callable[[nn.Module], Any] = adamw, accumulate: int = 1
) -> tuple[mg.Graph, tuple[torch.Tensor, torch.Tensor]]:
    """A step that is compiled and has run once."""
    torch.manual_seed(0)
    model, x, y = make()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer(model))
    step.config.backend("inductor")
    step.config.set_gradient_accumulation_steps(accumulate)
    step(x, y)
    assert step.backend == "inductor"
    return step, (x, y)


def recurrent() -> tuple[nn.Module, Any, Any]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.LSTM(32, 64, num_layers=2), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x)[0][-1])

    return Last(), torch.randn(20, 8, 32), torch.randint(10, (8,))


def dropped() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    return model, torch.randn(512, 64), torch.randint(10, (512,))


@pytest.mark.long
def test_the_peak_of_a_compiled_step_is_what_the_allocator_counts():
    step, batch = compiled()
    (build,) = step.builds
    assert build.memory.peak_bytes == pytest.approx(allocated_peak(lambda: step(*batch)), rel=0.005)
    assert build.memory.peak_bytes < 0.9 * build.plan.memory.peak_bytes  # other bytes than the plan's
    assert build.memory.state_bytes == build.plan.memory.state_bytes
    assert build.memory.argument_bytes == build.plan.memory.argument_bytes
    assert sum(holder.nbytes for holder in build.memory.holders) == build.memory.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "optimizer", "accumulate"),
    [
        (language, adamw, 1),
        (convolutions, momentum, 1),
        (recurrent, adamw, 1),
        (dropped, adamw, 1),
        (mlp, momentum, 4),
    ],
    ids=["language", "convolutions", "recurrent", "dropped", "accumulated"],
)
def test_so_it_is_of_other_models(make, optimizer, accumulate):
    step, batch = compiled(make, optimizer, accumulate)
    peak = allocated_peak(lambda: step(*batch))
    assert step.builds[0].memory.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.long
def test_holders_and_moments_are_of_the_program():
    step, _ = compiled()
    memory, program = step.builds[0].memory, step.builds[0].program
    names = {node.name for node in program.graph.nodes}
    assert {moment.node for moment in memory.timeline} <= names
    assert {holder.node for holder in memory.holders} <= names
    assert memory.peak_node in names
    assert {holder.origin.phase for holder in memory.holders} >= {"forward", "backward"}
    assert all(holder.origin.line for holder in memory.holders if holder.origin.phase == "forward")
    peak = max(moment.running_bytes for moment in memory.timeline)
    assert peak == memory.peak_bytes
    assert memory.timeline[-1].left_bytes < 100  # the loss


def test_it_is_known_of_a_step_that_is_found_in_the_cache():
    first, second = compiled()[0].builds[0], compiled()[0].builds[0]
    assert any("found in the cache" in note for note in second.notes)
    assert second.memory == first.memory


@pytest.mark.long
def test_a_torch_that_hides_its_lines_leaves_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(memory_lines, "_LAST_STEP", "no_such_method")
    build = compiled()[0].builds[0]
    assert build.memory == build.plan.memory


def of_two(stretches: list[Stretch]) -> Any:
    """What is held by code of a program of two nodes."""
    step = mg.trace(lambda x: x.exp().sin())
    step(torch.randn(3))
    (build,) = step.builds
    return held_by(stretches, build.program, build.plan.memory), build.program


def test_what_is_held_is_followed_through_the_code():
    one, other = Taken("a", "exp", 40, "temporary"), Taken("b", "sin", 30, "result")
    work = Taken("b inside", "sin", 25, "inside")
    memory, program = of_two(
        [Stretch("exp", [one], []), Stretch("sin", [other, work], ["b inside"]), Stretch("sin", [], ["a"])]
    )
    assert memory.timeline == (Moment("exp", 40, 40), Moment("sin", 95, 70), Moment("sin", 70, 30))
    assert (memory.peak_bytes, memory.peak_node) == (95, "sin")
    assert [(item.node, item.kind, item.nbytes) for item in memory.holders] == [
        ("exp", "temporary", 40),
        ("sin", "result", 30),
        ("sin", "inside", 25),
    ]
    assert {node.name for node in program.ops()} == {"exp", "sin"}
    assert all(item.origin.file == __file__ for item in memory.holders)


def test_of_nothing_nothing_is_known():
    assert of_two([])[0] is None


def test_stretches_are_read_as_they_were_written():
    written = Stretch("exp", [Taken("a", "exp", 40, "temporary")], ["a"])
    assert Stretch.from_json(written.as_json()) == written


def test_the_name_of_a_node_is_noted_with_it():
    graph = fx.Graph()
    node = graph.call_function(torch.exp, (graph.placeholder("x"),))
    node.meta = memory_lines.notes_of("exp_3")
    assert memory_lines._named([node]) == "exp_3"
