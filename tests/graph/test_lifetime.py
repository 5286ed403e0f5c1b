"""Graphs over time: memory, copies, pickles, threads, garbage."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import resource
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import monograph as mg
from tests.graph.test_tiny import TrainStep, batches, make_side
from tests.support import Side, assert_same, train_eagerly


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.long
def test_ten_thousand_steps_keep_resident_memory():
    step = TrainStep(Side(model := nn.Linear(4, 3), torch.optim.AdamW(model.parameters())))
    x, y = batches(1)[0]
    for _ in range(500):
        step(x, y)
    gc.collect()
    before = resident_bytes()
    for _ in range(10_000):
        step(x, y)
    gc.collect()
    assert resident_bytes() - before < 5 * 2**20


def test_a_dropped_graph_is_collected():
    side = make_side()
    step = TrainStep(side)
    step(*batches(1)[0])
    reference, build = weakref.ref(step), weakref.ref(step.builds[0])
    del step
    gc.collect()
    assert reference() is None
    assert build() is None


def test_the_code_of_a_dropped_graph_is_forgotten():
    gc.collect()
    before = set(linecache.cache)
    step = TrainStep(make_side())
    step(*batches(1)[0])
    assert set(linecache.cache) - before, "tracebacks show its lines"
    del step
    gc.collect()
    assert not [name for name in set(linecache.cache) - before if "monograph" in name and name[0] == "<"]


def test_replaced_optimizer_state_is_let_go():
    side = make_side()
    step = TrainStep(side)
    x, y = batches(1)[0]
    step(x, y)
    old = weakref.ref(next(iter(side.optimizer.state.values()))["exp_avg"])
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    step(x, y)
    gc.collect()
    assert len(step.builds) == 1
    assert old() is None, "the build keeps optimizer state alive that was replaced"


def test_a_deep_copy_trains_on_its_own():
    side = make_side()
    step = TrainStep(side)
    step(*batches(1)[0])
    counterpart = copy.deepcopy(step)
    assert counterpart.builds == ()
    before = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
    torch.manual_seed(3)
    mine = [counterpart(*batch).detach() for batch in batches()]
    assert_same(before, side.model.state_dict())
    torch.manual_seed(3)
    assert_same(mine, [step(*batch).detach() for batch in batches()])


def test_a_pickled_graph_trains_on():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    step(*batches(1)[0])
    counterpart = pickle.loads(pickle.dumps(step))
    assert_same([step(*b).detach() for b in batches()], [counterpart(*b).detach() for b in batches()])


@pytest.mark.long
def test_graphs_run_in_parallel_threads():
    """Four graphs are captured and run at once, each with the numbers of a plain loop."""
    results: dict[int, list[torch.Tensor]] = {}

    def make(index: int) -> Side:
        generator = torch.Generator().manual_seed(index)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return Side(model, torch.optim.Adam(model.parameters()))

    def run(index: int) -> None:
        step = TrainStep(make(index))
        results[index] = [step(*batch).detach() for batch in batches(20)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        expected = [entry["loss"] for entry in train_eagerly(make(index), loss_of, batches(20))]
        assert_same(expected, results[index])


def test_one_graph_in_several_threads_takes_one_call_at_a_time():
    side = make_side()
    step = TrainStep(side)
    x, y = batches(1)[0]
    step(x, y)
    threads = [threading.Thread(target=lambda: [step(x, y) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = {float(entries["step"]) for entries in side.optimizer.state.values()}
    assert counters == {101.0}
    assert len(step.builds) == 1


@pytest.mark.long
def test_capture_in_a_fresh_process_is_quiet():
    code = (
        "import torch, monograph as mg\n"
        "m = torch.nn.Linear(3, 2)\n"
        "s = mg.train_graph(m, torch.nn.MSELoss(), torch.optim.RAdam(m.parameters()))\n"
        "[s(torch.ones(4, 3), torch.zeros(4, 2)) for _ in range(8)]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""
