"""Graphs in several threads: each is captured and run as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import Plain, forward, inputs, seed_here, train
from tests.support import assert_same
from tests.support.steps import detached, graph, linear


def run_together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start at one time; their results, or the first error."""
    barrier, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def work(index: int, job: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            results[index] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def trained(seed: int, steps: int, *, by_graph: bool) -> Iterator[Any]:
    model = nn.Sequential(linear(seed), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step: Any = graph(train) if by_graph else Plain(train, optimizer)
    step.model = model
    if by_graph:
        step.add_optimizer(optimizer)

    def run() -> Any:
        losses = [detached(step(x)) for x in inputs(steps, 5, 4)]
        return losses, detached(list(model.parameters()))

    return run


@pytest.mark.one_case
@pytest.mark.parametrize("count", [2, 4])
def test_threads_capture_and_run_different_graphs(count):
    expected = [trained(seed, 6, by_graph=False)() for seed in range(count)]
    got = run_together(*[trained(seed, 6, by_graph=True) for seed in range(count)])
    assert_same(expected, got)


def test_a_thread_runs_eager_modules_while_another_captures():
    eager = nn.Sequential(linear(1), nn.Tanh())
    x = torch.ones(2, 4)
    expected = eager(x).detach()

    def forwards() -> list[torch.Tensor]:
        return [eager(x).detach() for _ in range(300)]

    got, _ = run_together(forwards, trained(0, 2, by_graph=True))
    assert_same([expected] * 300, got)


def test_threads_share_one_graph():
    step = graph(forward, model=linear())
    x = inputs(1, 5, 4)[0]
    expected = step.model(x).detach()
    got = run_together(*[lambda: [step(x).detach() for _ in range(20)]] * 4)
    assert_same([[expected] * 20] * 4, got)
    assert len(step.builds) == 1


def test_a_capture_in_one_thread_is_no_reason_for_a_build_in_another():
    """While a thread traces, functions of torch are others: the guards of no graph look at them then."""
    step, others, stop = graph(forward, model=linear()), [], threading.Event()
    x = inputs(1, 5, 4)[0]
    step(x)

    def capture() -> None:
        while not stop.is_set() and len(others) < 200:
            others.append(graph(forward, model=linear(1)))
            others[-1](x)

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        while len(others) < 4:
            step(x)
            step.model.train(not step.model.training)  # looks for the build again
    finally:
        stop.set()
        thread.join()
    assert len(step.builds) <= 2, [str(build.reason) for build in step.builds]


def test_dropout_in_another_thread_is_no_reseeding():
    """Captures look at torch's one random generator, which other threads may be drawing from."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for seed in range(3):
            trained(seed, 1, by_graph=True)()
    finally:
        stop.set()
        thread.join()


def test_what_another_thread_draws_while_a_condition_is_captured_stays_drawn():
    wanted, drawn, end = (threading.Event() for _ in range(3))

    def draw() -> None:
        wanted.wait(60)
        torch.rand(3)
        drawn.set()
        end.wait(60)

    def build(_self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        wanted.set()
        drawn.wait(60)
        return y

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        before = torch.get_rng_state()
        assert graph(build)(torch.ones(2)).tolist() == [2.0, 2.0]
        assert not torch.equal(torch.get_rng_state(), before)
    finally:
        end.set()
        thread.join()


def test_a_thread_that_only_waits_does_not_hide_reseeding():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(mg.CaptureError, match="random generator"):
            graph(lambda self, x: seed_here(x))(torch.ones(2))
    finally:
        stop.set()
        thread.join()
