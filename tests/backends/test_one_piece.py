"""The tensors of a compiled step have their places in one piece of memory: it needs no more than they do, and they stay whole."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.backends import inductor
from monograph.runtime import one_piece
from monograph.runtime.one_piece import most_allocated
from monograph.runtime.workspaces import Workspaces
from tests.support import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the heap is used")

TOLD = "MiB for the next step, in which each tensor has its place"


class Model(nn.Module):
    """Tensors of half a MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 256)
        layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x))


class Steps(mg.Graph):
    """A step that gives some of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.config.backend("inductor")

    def build(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.model(x)
        loss = made.pow(4).mean()
        loss.backward()
        return loss, made


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (512,), generator=generator) for _ in range(count)]


def copies(value: Any) -> Any:
    """The same on memory of its own."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda item: item.detach().clone(), value)


def run_of(graph: Steps, given: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """What the steps give, as it is after the last of them, and the parameters."""
    return [*(graph(x) for x in given), tuple(graph.model.to(nn.Module).parameters())]


@pytest.mark.long
def test_steps_give_what_the_first_run_gives_and_results_outlive_them():
    graph = Steps()
    (x,) = batches(1)
    graph.compile(x)
    assert TOLD in graph.explain()
    before = copies(graph.state_dict())
    first = copies(graph(x))  # from the heap
    later = []
    for _ in range(3):
        graph.load_state_dict(before)
        later.append(graph(x))
        graph.load_state_dict(before)
        graph(x.flip(0))
    for made in later:
        assert_same(first, made)


@pytest.mark.long
def test_a_step_that_fails_leaves_the_next_ones_whole():
    graph, given = Steps(), batches(3)
    expected = copies(run_of(graph, given))
    again = Steps()
    for x in given:
        with pytest.raises(IndexError):
            again(torch.full_like(x, 99))
        again(x)
    assert_same(expected[-1], tuple(again.model.to(nn.Module).parameters()))


def test_steps_of_two_threads_do_not_meet():
    given = batches(12)
    expected = copies(run_of(Steps(), given))
    graphs = [Steps(), Steps()]
    for graph in graphs:
        graph.compile(given[0])
    found: list[object] = [None, None]

    def train(number: int) -> None:
        found[number] = run_of(graphs[number], given)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in found:
        assert_same(expected, made)


def test_many_steps_in_one_call_are_as_single_ones():
    graph, again, given = Steps(), Steps(), batches(5)
    expected = run_of(graph, given)
    losses, made = again.many(torch.stack(given))
    assert_same(torch.stack([loss for loss, _ in expected[:-1]]), losses)
    assert_same(torch.stack([item for _, item in expected[:-1]]), made)


def test_another_shape_has_places_of_its_own():
    graph, again, given = Steps(), Steps(), batches(2)
    halves = [item[:256] for item in given]
    expected = copies([graph(x) for x in (given[0], halves[0], given[1], halves[1])])
    made = [again(x) for x in (given[0], halves[0], given[1], halves[1])]
    assert_same(expected, made)


def test_where_it_cannot_be_the_heap_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "hold_in_one_piece", lambda library: False)
    graph = Steps()
    graph.compile(*batches(1))
    assert TOLD not in graph.explain()
    graph(*batches(1))
    assert graph.backend == "inductor"


def test_what_a_thread_takes_is_counted():
    kept: list[torch.Tensor] = []
    assert most_allocated(lambda: kept.append(torch.empty(1 << 20))) == 4 << 20
    assert most_allocated(lambda: [torch.empty(1 << 20) for _ in range(5)]) == 20 << 20
    assert (
        most_allocated(lambda: [torch.empty(1 << 20).sum() for _ in range(5)]) < 5 << 20
    )  # one after the other
    kept.clear()


def test_what_another_thread_gives_back_is_counted_so():
    def one_after_the_other() -> None:
        for _ in range(5):
            held = [torch.empty(1 << 20)]
            thread = threading.Thread(target=held.pop)
            thread.start()
            thread.join()

    assert most_allocated(one_after_the_other) == 4 << 20


def test_what_a_kernel_takes_for_itself_is_counted():
    x, weight = torch.randn(4, 16, 64, 64), torch.randn(32, 16, 3, 3)
    options = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    known = Workspaces()
    op, like = torch.ops.aten.convolution.default, (x.to("meta"), weight.to("meta"))
    most = known.allocated_by(op, lambda: ((*like, *options), {}))
    made = op(x, weight, *options)
    assert most >= made.nbytes
    assert most == most_allocated(lambda: op(x, weight, *options))
    assert most == known.allocated_by(op, lambda: ((*like, *options), {}))
    assert known.allocated_by(torch.ops.aten.add.Tensor, lambda: ((like[0], 1), {})) == 0  # no library's
    assert known.allocated_by(op, lambda: ((like[0].mT[:, :3], like[1], *options), {})) == 0  # does not fit


class Pictures(mg.Graph):
    """A step of convolutions, whose kernels copy what they are given into blocks that they give back by themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 128), (128, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.model = nn.Sequential(*layers)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.config.backend("inductor")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


RESIDENT = """
import sys
import torch
from benchmarks.worker import reset_peak, resident_bytes, trim_heap
from monograph.runtime.one_piece import give_back
from tests.backends.test_one_piece import Pictures, Steps
torch.set_num_threads(1)
graph, x = (Steps(), torch.zeros(16384, dtype=torch.long))
if sys.argv[1] == "pictures":
    graph, x = Pictures(), torch.zeros(8, 3, 96, 96)
for _ in range(3):
    graph(x)
give_back()
trim_heap()
rest = resident_bytes("VmRSS")
reset_peak()
for _ in range(3):
    graph(x)
print(graph.builds[0].memory.peak_bytes, resident_bytes("VmHWM") - rest)
"""


@pytest.mark.long
@pytest.mark.parametrize("which", ["text", "pictures"])
def test_the_process_needs_what_was_said_before(which: str):
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, which],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    planned, resident = map(int, done.stdout.split())
    assert planned > 64 * 2**20  # beside it what else a process takes is little
    assert resident == pytest.approx(planned, rel=0.05)


def test_a_block_that_another_thread_gives_back_gets_no_place_and_others_keep_theirs():
    code = one_piece._code_here()
    steps = ctypes.c_void_p(code.monograph_new_steps())

    def places(*, elsewhere: bool) -> tuple[int, int, int]:
        assert code.monograph_begin(steps)
        held = [torch.empty(1 << 16) for _ in range(2)]
        found = [item.data_ptr() for item in held]
        if elsewhere:
            thread = threading.Thread(target=held.pop)
            thread.start()
            thread.join()
        else:
            held.pop()
        held.append(torch.empty(1 << 16))
        found.append(held[-1].data_ptr())
        held.clear()
        code.monograph_end(True)
        return found[0], found[1], found[2]

    places(elsewhere=False)  # is watched
    first, second, third = places(elsewhere=False)
    assert third == second  # in the same place, one after the other
    for turn in range(20):
        places(elsewhere=turn % 2 == 0)
    last = places(elsewhere=False)
    assert (last[0], last[2]) == (first, third)
    assert last[1] not in (first, third)
