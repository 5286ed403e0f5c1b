"""`inductor` in the background: steps run op by op until a step that is fixed, or until the code is there."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.internals import upgrades
from monograph.internals.internals import internals_of
from tests.backends.test_exact import OPTIMIZERS, batches, bits, both, check_same, state_of

SECONDS = 240.0


def beside(graph: mg.Graph) -> upgrades.ToInductor:
    """How far the newest build is."""
    found = internals_of(graph).upgrades.pending[graph.builds[-1].number]
    assert isinstance(found, upgrades.ToInductor)
    return found


def in_background(swap_at: int | None = None) -> tuple[object, mg.Graph]:
    """Plain PyTorch, and a graph that is compiled beside its steps."""
    eager, graph = both(OPTIMIZERS["momentum"], backend="auto")
    graph.config.backend("inductor", background=True, swap_at=swap_at)
    return eager, graph


@pytest.mark.long
def test_steps_before_the_swap_have_eagers_bits_and_the_swap_is_where_it_was_asked_for() -> None:
    eager, graph = in_background(swap_at=3)
    for number, batch in enumerate(batches(6)):
        expected, loss = eager(*batch), graph(*batch)  # type: ignore[operator]
        assert graph.backend == ("inductor" if number >= 3 else "aten")
        if number < 3:
            assert bits(expected) == bits(loss)
        torch.testing.assert_close(loss, expected)
        if number == 1:
            assert "code to come for build 0: inductor, compiling in another process for" in str(
                graph.explain()
            )
            assert "; it takes over at step 3" in str(graph.explain())
    assert len(graph.builds) == 1
    assert "inductor from step 3 on" in str(graph.explain())
    assert "code to come" not in str(graph.explain())
    assert graph.state_dict()["graph.about"]["swapped_at"] == 3


@pytest.mark.long
def test_the_step_of_the_swap_is_that_of_before_on_resume() -> None:
    eager, graph = in_background(swap_at=2)
    first, second, *others = batches(5)
    for batch in (first, second):
        assert bits(eager(*batch)) == bits(graph(*batch))  # type: ignore[operator]
        assert graph.backend == "aten"
    graph(*others.pop(0))
    assert graph.backend == "inductor"
    saved = copy.deepcopy(graph.state_dict())
    losses = [graph(*batch) for batch in others]

    _eager, resumed = in_background()  # whenever it is done, as far as it says itself
    resumed.load_state_dict(saved)
    assert [bits(resumed(*batch)) for batch in others] == [bits(loss) for loss in losses]
    assert resumed.backend == "inductor"
    assert resumed.state_dict()["graph.about"]["swapped_at"] == 2


@pytest.mark.long
def test_without_a_step_it_swaps_as_soon_as_the_code_is_there() -> None:
    _eager, graph = in_background()
    end = time.monotonic() + SECONDS
    (batch,) = batches(1)
    while graph.backend != "inductor" if graph.builds else True:
        graph(*batch)
        assert time.monotonic() < end
    assert internals_of(graph).upgrades.swapped_at is not None


@pytest.mark.long
def test_in_deterministic_mode_the_first_step_waits() -> None:
    _eager, graph = in_background()
    torch.use_deterministic_algorithms(True)
    try:
        graph(*batches(1)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert graph.backend == "inductor"
    assert internals_of(graph).upgrades.swapped_at == 0


def test_a_process_that_ends_says_that_it_gives_the_compiler_up(caplog: pytest.LogCaptureFixture) -> None:
    _eager, graph = in_background()
    for batch in batches(2):
        graph(*batch)
    compilation = beside(graph).compilation
    assert compilation is not None
    compilation._at_exit()
    (record,) = [item for item in caplog.records if "the next run begins again" in item.message]
    assert record.levelname == "WARNING"
    os.killpg(compilation.pid, signal.SIGKILL)
    compilation._run.wait(SECONDS)
    caplog.clear()
    compilation._at_exit()  # it is not this process that has ended it
    assert not caplog.records


ENDS = """
import torch
from torch import nn
import monograph as mg
model = nn.Linear(3, 2)
step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
step.config.backend("inductor", background=True)
for _ in range(2):
    step(torch.ones(4, 3), torch.ones(4, 2))
"""


@pytest.mark.long
def test_it_says_so_before_the_compiler_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stderr.count("the next run begins again") == 1


def test_a_compiler_that_is_killed_leaves_the_step_as_it_is() -> None:
    eager, graph = in_background()
    for number, batch in enumerate(batches(20)):
        assert bits(eager(*batch)) == bits(graph(*batch))  # type: ignore[operator]
        if number == 1:
            compilation = beside(graph).compilation
            assert compilation is not None
            os.killpg(compilation.pid, signal.SIGKILL)
            compilation._run.wait(SECONDS)
    check_same(eager, graph)  # type: ignore[arg-type]
    assert graph.backend == "aten"
    assert "inductor could not be used" in str(graph.explain())


def test_a_step_that_has_passed_is_an_error() -> None:
    _eager, graph = both(OPTIMIZERS["sgd"], backend="aten")
    first, second, third = batches(3)
    graph(*first)
    graph(*second)
    graph.config.backend("inductor", background=True, swap_at=1)
    with pytest.raises(mg.ConfigError, match="swap_at=1 has passed: step 2 is next"):
        graph(*third)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fastest", {}, "unknown backend 'fastest'"),
        ("inductor", {"swap_at": 3}, "background=True"),
        ("inductor", {"background": True, "swap_at": -1}, "swap_at=-1"),
        ("inductor", {"background": True, "swap_at": 1.0}, "swap_at=1.0"),
        ("aten", {"background": True}, "nothing to wait for"),
        ("exact", {"background": True}, "auto"),
    ],
)
def test_wrong_settings_are_errors(name: str, options: dict[str, object], message: str) -> None:
    _eager, graph = both(OPTIMIZERS["sgd"])
    with pytest.raises(mg.ConfigError, match=message):
        graph.config.backend(name, **options)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_checkpoint_on_disk_says_when_it_was(tmp_path: Path) -> None:
    _eager, graph = in_background(swap_at=1)
    for batch in batches(3):
        graph(*batch)
    mg.save(graph.state_dict(), tmp_path / "state")
    _eager, resumed = in_background()
    resumed.load_state_dict(mg.load(tmp_path / "state"))
    assert internals_of(resumed).upgrades.swapped_at == 1


@pytest.mark.long
def test_compiling_goes_on_when_the_thread_ends_that_began_it() -> None:
    _eager, graph = in_background()
    (batch,) = batches(1)

    def begin() -> None:
        graph(*batch)
        time.sleep(10)  # until the other process has all that it needs, and compiles

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    compilation = beside(graph).compilation
    assert compilation is not None
    compilation._run.wait(SECONDS)
    graph(*batch)
    assert graph.backend == "inductor"


@pytest.mark.long
def test_many_goes_on_by_the_code_of_the_swap() -> None:
    (_, together), (_, single) = (in_background(swap_at=3) for _ in range(2))
    found = batches(8)
    losses = together.many(*map(torch.stack, zip(*found, strict=True)))
    assert bits(losses) == bits(torch.stack([single(*batch) for batch in found]))
    states = [state_of(graph)[0].parameters() for graph in (together, single)]
    assert all(bits(one) == bits(other) for one, other in zip(*states, strict=True))
