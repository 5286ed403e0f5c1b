"""config.max_builds(n, keep="recent"): the least recently used build goes, and is made again when it is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.internals.internals import internals_of
from tests.support import assert_same


class Step(mg.Graph):
    """A step that has a build for each mode."""

    def __init__(self, n: int | None = None, *, backend: str = "aten", keep: str | None = "recent") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        self.config.backend(backend)
        self.config.max_builds(n, keep=keep if n else None)
        self.mode = "a"

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * len(self.mode)
        loss.backward()
        return loss


X = torch.ones(4, 8)


def state(step: Step) -> dict[str, Any]:
    """All but what checkpoints say of the builds that there were."""
    return {path: value for path, value in step.state_dict().items() if not path.startswith("graph.about")}


def modes(step: Step) -> list[str]:
    """Which builds there are."""
    texts = [line for build in step.builds for line in build.guards.texts() if line.startswith("graph.mode")]
    return [text.partition("'")[2].rstrip("'") for text in texts]


def run(step: Step, order: str) -> list[torch.Tensor]:
    found = []
    for letter in order:
        step.mode = letter * (ord(letter) - ord("a") + 1)
        found.append(step(X).detach().clone())
    return found


def test_the_least_recently_used_goes() -> None:
    step = Step(2)
    run(step, "abac")
    assert modes(step) == ["a", "ccc"]
    run(step, "a")
    assert [build.number for build in step.builds] == [0, 2]  # it was kept
    run(step, "b")
    assert modes(step) == ["a", "bb"]
    assert [build.number for build in step.builds] == [0, 3]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_swaps_among_more_forms_have_the_same_bits(n: int) -> None:
    order = "abcdabcdaabdcc"
    limited, free = Step(n), Step()
    torch.manual_seed(1)
    expected = run(free, order)
    torch.manual_seed(1)
    assert_same(expected, run(limited, order))
    assert_same(state(free), state(limited))
    assert (len(limited.builds), len(free.builds)) == (n, 4)


@pytest.mark.parametrize(
    ("backend", "order", "n"),
    [
        ("aten", "abcabcd", 2),
        pytest.param("exact", "abca", 2, marks=pytest.mark.long),
        pytest.param("inductor", "aba", 1, marks=pytest.mark.long),
    ],
)
def test_what_was_dropped_is_freed(backend: str, order: str, n: int) -> None:
    step, known = Step(n, backend=backend), dict[int, list[weakref.ref[Any]]]()
    for letter in order:
        run(step, letter)
        newest = step.builds[-1]
        parts = (newest, newest.executor, newest.program, newest.plan, newest.captured)
        known.setdefault(newest.number, [weakref.ref(part) for part in parts])
        del newest, parts
        gc.collect()
        living = {number for number, found in known.items() if any(item() is not None for item in found)}
        assert living == {build.number for build in step.builds}
        assert len(living) <= n
    assert len(known) == len(order)


def test_one_that_serves_no_call_any_more_goes_first() -> None:
    step = Step()
    run(step, "abcdefgha")
    run(
        step, "i"
    )  # eight builds serve at most that differ in guards alone: the first one goes, though it was used
    step.config.max_builds(9, keep="recent")
    run(step, "j")
    assert [build.number for build in step.builds] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_sizes_too() -> None:
    graph = mg.trace(lambda x: x.sum())
    graph.config.max_builds(2, keep="recent")
    for shape in ((2,), (2, 3), (2, 3, 4), (2,), (2, 3), (2, 3, 4)):
        assert graph(torch.ones(shape)).item() == torch.ones(shape).sum().item()
    assert len(graph.builds) == 2
    assert graph.builds[-1].reason == "build 2 was dropped for others"
    assert "4 more were dropped" in str(graph.explain())


def test_a_build_for_any_size_is_made_again_as_one() -> None:
    graph = mg.trace(lambda x: x.sum())
    graph.config.max_builds(1, keep="recent")
    for shape in ((2, 3), (4, 3), (2,), (5, 3), (6, 3), (7, 3)):
        assert graph(torch.ones(shape)).item() == torch.ones(shape).sum().item()
    (build,) = graph.builds
    assert (build.number, build.executor.steps) == (3, 3)
    assert build.reason == "build 1 was dropped for others"


def test_many_go_on_after_a_drop() -> None:
    step, plain = Step(1), Step()
    for graph in (step, plain):
        torch.manual_seed(2)
        graph.many(torch.ones(3, 4, 8))
        run(graph, "b")
        graph.mode = "a"
        graph.many(torch.ones(3, 4, 8))
    assert_same(state(plain), state(step))
    assert [build.executor.steps for build in step.builds] == [3]


def test_a_failed_capture_drops_nothing() -> None:
    step = Step(1)
    run(step, "a")
    (build,) = step.builds
    with pytest.raises(mg.MonographError):
        step(torch.ones(4, 7))
    assert step.builds == (build,)


def test_what_waits_for_a_compiler_goes_too() -> None:
    step = Step(1, backend="auto")
    run(step, "abc")
    assert list(internals_of(step).upgrades.pending) == [step.builds[0].number]
    assert list(internals_of(step).mistakes.watched) == [step.builds[0].number]


def test_a_smaller_limit_holds_from_the_next_build_on() -> None:
    step = Step(3)
    run(step, "abc")
    step.config.max_builds(1, keep="recent")
    run(step, "a")
    assert len(step.builds) == 3
    run(step, "d")
    assert modes(step) == ["dddd"]


def test_without_keep_it_is_an_error() -> None:
    step = Step(2, keep=None)
    run(step, "ab")
    before = state(step)
    with pytest.raises(mg.CaptureError, match="has 2 builds and would need another") as caught:
        run(step, "c")
    assert 'keep="recent"' in caught.value.hint
    assert_same(before, state(step))


@pytest.mark.parametrize("arguments", [(3, "newest"), (3, True), (0, "recent"), (2.5, None), (True, None)])
def test_a_wrong_limit_names_the_line(arguments: tuple[Any, Any]) -> None:
    step = Step(2)
    n, keep = arguments
    with pytest.raises(mg.DefinitionError, match="max_builds") as caught:
        step.config.max_builds(n, keep=keep)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert "max_builds=2, keep='recent'" in repr(step.config)


def by_an_attribute(graph: mg.Graph, mode: bool) -> tuple[bool, ...]:
    graph.flag = mode
    return ()


def by_a_module(graph: mg.Graph, mode: bool) -> tuple[bool, ...]:
    graph.model.to(nn.Module).flag = mode
    return ()


def by_train_and_eval(graph: mg.Graph, mode: bool) -> tuple[bool, ...]:
    graph.model.train(mode)
    return ()


def by_an_argument(_graph: mg.Graph, mode: bool) -> tuple[bool, ...]:
    return (mode,)


@pytest.mark.parametrize(
    "switch",
    [by_an_attribute, by_a_module, by_train_and_eval, by_an_argument],
    ids=lambda item: item.__name__,
)
def test_a_flag_that_alternates_has_two_builds(switch: Callable[[mg.Graph, bool], tuple[bool, ...]]) -> None:
    """Each step is served by the build for its value, also while a number moves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flag = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.flag and self.training else x * 3

    class Flagged(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.flag, self.weight = Net(), True, 1.0

        def build(self, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
            made = self.model(x)
            return (made if self.flag and flag else made + x) * self.weight

    graph, plain = Flagged(), Flagged()
    numbers = []
    for step in range(12):
        for side in (graph, plain):
            arguments = switch(side, step % 2 == 0)
        assert torch.equal(graph(torch.ones(2), *arguments), plain.eager(torch.ones(2), *arguments))
        numbers.append(len(graph.builds))
    assert numbers == [1] + [2] * 11
    for step in range(12):
        for side in (graph, plain):
            arguments, side.weight = switch(side, step % 3 == 0), 0.9**step
        assert torch.equal(graph(torch.ones(2), *arguments), plain.eager(torch.ones(2), *arguments))
    assert len(graph.builds) <= 4  # two more, in which the number is an input
