"""`graph.many` of compiled steps, which are made in a loop of C: the bits, the errors and the state of single calls."""

from __future__ import annotations

import dataclasses
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import monograph as mg
from monograph.backends import repeating
from monograph.compat.inductor import repeated_runs
from monograph.compat.inductor.repeated_runs import RepeatedRuns, Runs
from monograph.errors import BackendError
from monograph.runtime.repetition import Repetition
from tests.support import ROOT, assert_same
from tests.support.choice import only_quick

STEPS, WATCHED = 60, 17  # the first steps of a graph are looked at one by one
Looped = list[int]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.head = nn.Embedding(5, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.linear(x)) + self.table(words))


class Step(mg.Graph):
    """A step of training that ends with an IndexError where a word is not in the table."""

    def __init__(self, schedule: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.add_optimizer(optimizer, lr_sch=None if schedule is None else schedule(optimizer))
        self.optimizer = lambda: optimizer
        self.config.backend("inductor")

    def build(self, x: torch.Tensor, words: torch.Tensor) -> Any:
        logits = self.model(x, words)
        loss = F.cross_entropy(logits, words % 3)
        loss.backward()
        return {"loss": loss, "right": (logits.argmax(1) == words % 3).sum(), "none": None, "name": "a"}


def batches(steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, 6, 4, generator=generator)
    return x, torch.randint(5, (steps, 6), generator=generator)


def one_by_one(graph: Any, *stacks: torch.Tensor) -> Any:
    """What many() is to give, by single calls."""
    found = [graph(*parts) for parts in zip(*stacks, strict=True)]
    tensors = {key: torch.stack([item[key].detach() for item in found]) for key in ("loss", "right")}
    return {**tensors, "none": None, "name": ["a"] * len(found)}


def detached(results: Any) -> Any:
    return {**results, "loss": results["loss"].detach()}


def assert_same_state(one: Any, other: Any) -> None:
    assert_same(one.state_dict(), other.state_dict())


def almost(steps: int, graphs: int = 1) -> range:
    """A graph makes single calls for its last few steps, and where the first needs a closer look."""
    return range(steps - 10 * graphs, steps + 1)


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Looped:
    """How many steps each piece of a loop has made."""
    made: Looped = []
    theirs = Repetition.run

    def run(self: Repetition, count: Callable[[int], object]) -> None:
        before = self.made
        try:
            theirs(self, count)
        finally:
            made.append(self.made - before)

    monkeypatch.setattr(Repetition, "run", run)
    return made


@pytest.mark.one_case
@pytest.mark.parametrize("seconds", [repeated_runs.PIECE_SECONDS, 0.0], ids=["pieces", "each step"])
def test_the_bits_are_those_of_single_calls(
    seconds: float, looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_runs, "PIECE_SECONDS", seconds)
    together, single = Step(), Step()
    stacks = batches()
    found = together.many(*stacks)
    assert sum(looped) in almost(STEPS - WATCHED)
    assert seconds > 0 or max(looped) == 1
    assert_same(one_by_one(single, *stacks), detached(found))
    assert_same_state(single, together)
    assert together.state_dict()["graph.steps"] == STEPS
    assert found["loss"].requires_grad
    with pytest.raises(mg.GraphBoundaryError):
        found["loss"].sum().backward()

    again = together.many(*stacks)  # all of them in a loop
    assert sum(looped) in almost(2 * STEPS - WATCHED)
    assert again["loss"].requires_grad
    assert_same(one_by_one(single, *stacks), detached(again))
    with pytest.raises(mg.GraphBoundaryError):
        again["loss"][0].backward()
    assert [build.executor.steps for build in together.builds] == [2 * STEPS]
    assert torch.is_grad_enabled()


def _sliced(stack: torch.Tensor) -> torch.Tensor:
    return torch.cat([stack[:3], stack])[3:]


def _of_every_second(stack: torch.Tensor) -> torch.Tensor:
    return torch.stack([stack, stack], 1).flatten(0, 1)[::2]


def _last_first(stack: torch.Tensor) -> torch.Tensor:
    return stack.movedim(0, -1).contiguous().movedim(-1, 0)


def _repeated(stack: torch.Tensor) -> torch.Tensor:
    return stack[:1].expand_as(stack)


@pytest.mark.parametrize(
    "layout",
    only_quick([_sliced, _of_every_second, _last_first, _repeated], _sliced, _of_every_second, _repeated),
)
def test_stacks_of_any_layout(layout: Callable[[torch.Tensor], torch.Tensor], looped: Looped) -> None:
    together, single = Step(), Step()
    x, words = map(layout, batches())
    found = together.many(x, words)
    # where a part has strides of its own, it takes a build of its own
    assert_same(one_by_one(single, x, words), detached(found))
    assert_same_state(single, together)
    assert sum(looped) in almost(STEPS - WATCHED)


@pytest.mark.every_case
@pytest.mark.parametrize("bad", [WATCHED, 31, STEPS - 1])
def test_an_error_in_the_loop(bad: int, looped: Looped) -> None:
    together, single = Step(), Step()
    x, words = batches()
    broken = words.clone()
    broken[bad, 2] = 7
    with pytest.raises(IndexError) as raised:
        together.many(x, broken)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert f"in step {bad} of {STEPS}, counted from 0: the state is that of after step {bad - 1}" in told
    assert sum(looped) == bad - WATCHED
    one_by_one(single, x[:bad], words[:bad])
    assert_same_state(single, together)
    assert_same(one_by_one(single, x[bad:], words[bad:]), detached(together.many(x[bad:], words[bad:])))


def test_state_that_is_replaced_between_two_loops(looped: Looped) -> None:
    together, single = Step(), Step()
    x, words = batches()
    before: Any = None
    for number in range(4):
        found = together.many(x, words)
        assert_same(one_by_one(single, x, words), detached(found))
        for graph in (together, single):
            if number == 0:
                before = graph.state_dict()
                graph.optimizer().param_groups[0]["lr"] = 0.02
            elif number == 1:
                graph.model.head.weight.data = graph.model.head.weight.data.clone() * 0.5
            else:
                graph.load_state_dict(before)
        assert_same_state(single, together)
    assert sum(looped) in almost(4 * STEPS - WATCHED)


@pytest.mark.long
def test_results_of_any_layout_and_type(looped: Looped) -> None:
    class Forward(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3)
            self.config.backend("inductor")

        def build(self, x: torch.Tensor) -> Any:
            y = self.model(x)
            return {
                "across": y.t() * 2,
                "half": y.to(torch.bfloat16),
                "positive": y > 0,
                "order": y.argsort(1),
                "double": y.double().exp(),
                "one": y[:1] + 1,
                "again": [y.sum(), 3, None],
                "through": torch.stack([y, y + 1]).transpose(0, 2),
            }

    graph, (x, _) = Forward(), batches()
    expected = [graph(part) for part in x]
    found = graph.many(x)
    assert sum(looped) == STEPS
    again = found.pop("again")
    assert again[1:] == [[3] * STEPS, None]
    assert_same(torch.stack([item["again"][0].detach() for item in expected]), again[0].detach())
    for key, stacked in found.items():
        assert_same(torch.stack([item[key].detach() for item in expected]), stacked.detach(), key)
        assert stacked.is_contiguous()
        assert stacked.requires_grad == expected[0][key].requires_grad


@pytest.mark.long
def test_results_that_are_state(looped: Looped) -> None:
    class Moving(Step):
        def build(self, x: torch.Tensor, words: torch.Tensor) -> Any:
            return {
                **super().build(x, words),
                "weight": self.model.head.weight,
                "row": self.model.head.weight[1],
            }

    together, single = Moving(), Moving()
    x, words = batches()
    found = together.many(x, words)
    for number, parts in enumerate(zip(x, words, strict=True)):
        single(*parts)
        assert torch.equal(found["weight"][number], single.model.head.weight)
        assert torch.equal(found["row"][number], single.model.head.weight[1])
    assert not looped


@pytest.mark.long
def test_random_numbers(looped: Looped) -> None:
    """An error has to leave the generator as it was before its step: such steps are called one by one."""

    class Drawing(Step):
        def build(self, x: torch.Tensor, words: torch.Tensor) -> Any:
            return super().build(F.dropout(x, 0.3), words)

    together, single = Drawing(), Drawing()
    x, words = batches()
    broken = words.clone()
    broken[40] = 7
    torch.manual_seed(1)
    with pytest.raises(IndexError):
        together.many(x, broken)
    then = torch.rand(3)
    torch.manual_seed(1)
    one_by_one(single, x[:40], words[:40])
    assert torch.equal(then, torch.rand(3))
    assert_same_state(single, together)
    assert not looped


@pytest.mark.long
def test_gradients_that_are_kept(looped: Looped) -> None:
    together, single = Step(), Step()
    x, words = batches()
    for graph in (together, single):
        graph.config.keep_gradients()
    assert_same(one_by_one(single, x, words), detached(together.many(x, words)))
    for one, other in zip(single.model.parameters(), together.model.parameters(), strict=True):
        assert_same(one.grad, other.grad)
    assert not looped


def test_a_result_that_is_not_as_described(looped: Looped, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = RepeatedRuns.__init__

    def init(self: RepeatedRuns, library: Any, code: Any, results: Any) -> None:
        theirs(self, library, code, [dataclasses.replace(form, shape=(2,)) for form in results])

    monkeypatch.setattr(RepeatedRuns, "__init__", init)
    graph = Step()
    with pytest.raises(RuntimeError, match="another result than its program says"):
        graph.many(*batches())
    assert looped == [1]


@pytest.mark.one_case
@pytest.mark.parametrize("is_static", [True, False])
def test_a_scaler_of_gradients(is_static: bool, looped: Looped) -> None:
    """One that moves calls an op without a C interface: such steps are called one by one."""
    kind: Any = mg.amp.StaticGradScaler if is_static else torch.amp.GradScaler

    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9))
            self.set_grad_scaler(
                kind(2.0**20) if is_static else kind("cpu", init_scale=2.0**20, growth_interval=2)
            )
            self.config.enable_amp(True, dtype=torch.bfloat16)
            self.config.backend("inductor")

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.model(x) * 2.0**20).square().sum()
            loss.backward()
            return loss

    together, single = Scaled(), Scaled()
    x, _ = batches()
    x[40] = float("inf")  # this update is left out
    expected = torch.stack([single(part).detach() for part in x])
    assert_same(expected, together.many(x).detach())
    assert_same_state(single, together)
    assert sum(looped) in (almost(STEPS - WATCHED) if is_static else [0])


SCRIPT = """
import gc, torch
from tests.graph.test_many_in_a_loop import Step, batches
graph, (x, words) = Step(), batches(200_000)
graph.many(x[:20], words[:20])
gc.collect()
gc.disable()  # an interrupt that comes while a dead object is cleaned up is lost
print("ready", flush=True)
try:
    graph.many(x, words)
except KeyboardInterrupt:
    steps = graph.state_dict()["graph.steps"]
    single = Step()
    for number in (*range(20), *range(steps - 20)):
        single(x[number], words[number])
    same = all(map(torch.equal, graph.model.parameters(), single.model.parameters()))
    print("interrupted", steps, same, single.state_dict()["graph.steps"] == steps, flush=True)
"""


@pytest.mark.long
def test_an_interrupt_is_met_between_two_steps() -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        threading.Event().wait(0.05)
        process.send_signal(signal.SIGINT)
        told = process.stdout.readline().split()
        assert told[0] == "interrupted"
        assert 20 < int(told[1]) < 200_000
        assert told[2:] == ["True", "True"]
    finally:
        process.kill()
        process.wait()


def test_a_handler_runs_after_some_milliseconds(looped: Looped) -> None:
    """What it does to state and settings holds from the next piece on."""
    graph, seen = Step(), list[int]()
    x, words = batches(20_000)
    graph.many(x[:40], words[:40])
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(graph.state_dict()["graph.steps"]))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        graph.many(x, words)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) == 1
    assert seen[0] in [WATCHED + sum(looped[:pieces]) for pieces in range(len(looped))]


@pytest.mark.long
def test_two_threads(looped: Looped) -> None:
    graphs, stacks = [Step(), Step()], batches(400)
    for graph in graphs:
        graph.many(*batches(20))
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = graphs[number].many(*stacks)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(detached(found[0]), detached(found[1]))
    assert_same_state(*graphs)
    assert sum(looped) in almost(2 * (20 - WATCHED + 400), graphs=2)


def _no_function(self: Any, *args: Any) -> None:
    raise AttributeError("no such function")


def _no_compiler(texts: Any) -> None:
    raise BackendError("there is no compiler")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("owner", "name", "ours"),
    [(RepeatedRuns, "__init__", _no_function), (repeating, "compiled", _no_compiler)],
    ids=["torch", "compiler"],
)
def test_without_what_it_takes_steps_are_called_one_by_one(
    owner: Any, name: str, ours: Any, looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, ours)
    together, single = Step(), Step()
    stacks = batches()
    assert_same(one_by_one(single, *stacks), detached(together.many(*stacks)))
    assert_same_state(single, together)
    assert not looped


def test_a_step_that_fails_in_the_middle_leaves_the_graph_unusable(
    looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, stacks = Step(), batches()
    graph.many(*batches(20))
    theirs = Runs.run

    def run(self: Runs) -> None:
        theirs(self)
        self._runs.made, self._runs.failed = 3, 1
        assert self._begun is not None
        self._begun.fill_(1)

    monkeypatch.setattr(Runs, "run", run)
    with pytest.raises(mg.TornStateError, match="in step 3 of 60"):
        graph.many(*stacks)
    with pytest.raises(mg.TornStateError):
        graph(*(stack[0] for stack in stacks))
    assert looped[-1] == 3


def test_nothing_is_kept_alive(looped: Looped) -> None:
    graph, stacks = Step(), batches()
    graph.many(*stacks)
    watched = [*stacks, graph.model.head.weight, graph.optimizer().state[graph.model.head.weight]["exp_avg"]]

    def users() -> list[int]:
        return [torch._C._storage_Use_Count(item.untyped_storage()._cdata) for item in watched]

    before = users()
    graph.many(*stacks)
    broken = stacks[1].clone()
    broken[50] = 7
    with pytest.raises(IndexError):
        graph.many(stacks[0], broken)
    gc.collect()  # the error
    assert all(now <= then for now, then in zip(users(), before, strict=True))
    assert sum(looped) in almost(STEPS - WATCHED + STEPS + 50)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7),
    "one after another": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [25],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 30), lr_scheduler.PolynomialLR(optimizer, 40)]
    ),
}


@pytest.mark.parametrize("seconds", [repeated_runs.PIECE_SECONDS, 0.0], ids=["pieces", "each step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_ahead_of_the_loop(
    name: str, seconds: float, looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_runs, "PIECE_SECONDS", seconds)
    together, single = Step(SCHEDULES[name]), Step(SCHEDULES[name])
    stacks = batches()
    assert_same(one_by_one(single, *stacks), detached(together.many(*stacks)))
    assert_same_state(single, together)
    assert sum(looped) in almost(STEPS - WATCHED)
    assert len(together.builds) == 1


class Branching(Step):
    """Python decides on the rate."""

    def build(self, x: torch.Tensor, words: torch.Tensor) -> Any:
        return super().build(x * 2 if self.optimizer().param_groups[0]["lr"] > 0.02 else x, words)


def test_a_schedule_passes_a_branch_in_its_step(looped: Looped) -> None:
    together, single = Branching(SCHEDULES["cosine"]), Branching(SCHEDULES["cosine"])
    stacks = batches()
    assert_same(one_by_one(single, *stacks), detached(together.many(*stacks)))
    assert_same_state(single, together)
    assert len(together.builds) == len(single.builds) == 2


@pytest.mark.long
def test_a_schedule_that_ends_does_so_in_its_step(looped: Looped) -> None:
    def schedule(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=45)

    together, single = Step(schedule), Step(schedule)
    stacks = batches()
    for number in range(45):
        single(*(stack[number] for stack in stacks))
    with pytest.raises(ValueError, match="Tried to step 46 times"):
        single(*(stack[45] for stack in stacks))
    with pytest.raises(ValueError, match="Tried to step 46 times") as caught:
        together.many(*stacks)
    assert "in step 45 of 60" in caught.value.__notes__[-1]
    assert sum(looped) in almost(45 - WATCHED)
    assert_same_state(single, together)


def test_an_error_in_a_scheduled_loop_leaves_the_schedule_where_the_steps_are(looped: Looped) -> None:
    together, single = Step(SCHEDULES["cosine"]), Step(SCHEDULES["cosine"])
    x, words = batches()
    words[31] = 7
    with pytest.raises(IndexError):
        together.many(x, words)
    for number in range(31):
        single(x[number], words[number])
    assert_same_state(single, together)
    assert looped[-1] == 0


def test_a_handler_finds_the_rate_of_the_step(looped: Looped) -> None:
    graph, seen = Step(SCHEDULES["cosine"]), list[bool]()
    x, words = batches(6_000)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.05)
    optimizer.step()
    scheduler, rates = SCHEDULES["cosine"](optimizer), list[float]()
    for _ in range(6_000):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    graph.many(x[:40], words[:40])

    def look(*_: object) -> None:
        steps = graph.state_dict()["graph.steps"]
        seen.append(steps == 6_000 or graph.optimizer().param_groups[0]["lr"] == rates[steps])

    before = signal.signal(signal.SIGALRM, look)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        graph.many(x[40:], words[40:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) > 2
    assert all(seen)


@pytest.mark.parametrize("change", ["step of its own", "function", "tensor"])
def test_schedules_that_cannot_go_ahead_do_not(change: str, looped: Looped) -> None:
    """The function of a user may look at anything, and a tensor is changed in place."""

    def schedule(optimizer: Any) -> Any:
        if change == "tensor":
            optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        if change == "step of its own":
            made = lr_scheduler.StepLR(optimizer, 5)
            theirs = made.step
            made.step = lambda: (
                theirs(),
                optimizer.param_groups[0].update(weight_decay=0.1 * made.last_epoch),
            )
            return made
        function = lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
        return function if change == "function" else lr_scheduler.StepLR(optimizer, 5)

    together, single = Step(schedule), Step(schedule)
    stacks = batches()
    assert_same(one_by_one(single, *stacks), detached(together.many(*stacks)))
    assert not looped
