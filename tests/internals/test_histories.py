"""What a step keeps of the steps before it: a build for each length of it, and what to write so that there is one build."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest
import torch

import monograph as mg

N = 6  # more than are built before it is said again


class Keeps(mg.Graph):
    """A step that keeps the last results, as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = self.first()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        self.keep(out.detach())
        return out.sum()

    def first(self) -> Any:
        return []

    def keep(self, new: torch.Tensor) -> None:
        raise NotImplementedError


class Cut(Keeps):
    def keep(self, new: torch.Tensor) -> None:
        self.recent.append(new)
        self.recent = self.recent[-N:]


class Popped(Keeps):
    def keep(self, new: torch.Tensor) -> None:
        self.recent.append(new)
        if len(self.recent) > N:
            self.recent.pop(0)


class Deque(Keeps):
    def first(self) -> Any:
        return deque(maxlen=N)

    def keep(self, new: torch.Tensor) -> None:
        self.recent.append(new)


class Tuple(Keeps):
    def first(self) -> Any:
        return ()

    def keep(self, new: torch.Tensor) -> None:
        self.recent = (*self.recent, new)[-N:]


class Keyed(Keeps):
    def first(self) -> Any:
        self.steps = 0
        return {}

    def keep(self, new: torch.Tensor) -> None:
        self.recent[self.steps] = new
        self.recent.pop(self.steps - 3, None)
        self.steps += 1


class Joined(Keeps):
    def first(self) -> Any:
        return torch.zeros(0, 2)

    def keep(self, new: torch.Tensor) -> None:
        self.recent = torch.cat([self.recent, new])[-3 * N :]


class OneTensor(Keeps):
    """As the advice about lists says."""

    def first(self) -> Any:
        return torch.zeros(N, 3, 2)

    def keep(self, new: torch.Tensor) -> None:
        last = self.recent
        last.copy_(torch.cat([last[1:], new.detach()[None]]))


class Rows(Keeps):
    """As the advice about tensors that grow says."""

    def first(self) -> Any:
        return torch.zeros(3 * N, 2)

    def keep(self, new: torch.Tensor) -> None:
        self.recent.copy_(torch.cat([self.recent, new])[-3 * N :])


def called(graph: Keeps, steps: int = N + 2) -> Keeps:
    for step in range(steps):
        graph(torch.full((3, 2), float(step)))
    return graph


ONE_TENSOR = (
    "each length of graph.recent has a build",
    "last = torch.zeros(n, *new.shape): last.copy_(torch.cat([last[1:], new.detach()[None]]))",
)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (Cut, ONE_TENSOR),
        (Popped, ONE_TENSOR),
        (Deque, ONE_TENSOR),
        (Tuple, ONE_TENSOR),
        (Keyed, ("each set of keys of graph.recent has a build",)),
        (Joined, ("graph.recent.copy_(torch.cat([graph.recent, new])[-n:])",)),
    ],
)
@pytest.mark.every_case
def test_each_length_of_a_history_has_a_build(
    kind: type[Keeps], written: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """What to write is said at the first such build, and at the fourth that builds can be limited."""
    caplog.set_level(logging.WARNING, "monograph")
    graph = called(kind())
    assert len(graph.builds) > N
    for build in graph.builds[1:5]:
        assert all(text in build.reason.advice for text in written), build.reason.advice
    first, again, *others = [record.getMessage() for record in caplog.records]
    assert ": build 1: " in first
    assert all(text in first for text in written)
    assert ": build 4: " in again
    assert "these are 4 builds for one thing, and config.max_builds(n) makes more than n an error" in again
    assert again.endswith("what to write is in the line of build 1")
    assert not any(" 4 builds for one thing" in line for line in others)


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "as_before"), [(OneTensor, Cut), (Rows, Joined)])
def test_the_last_ones_in_one_tensor_have_one_build(kind: type[Keeps], as_before: type[Keeps]) -> None:
    graph, before = called(kind()), called(as_before())
    assert len(graph.builds) == 1
    kept = before.recent if torch.is_tensor(before.recent) else torch.stack(before.recent)
    assert torch.equal(graph.recent, kept)


def test_the_limit_has_the_name_that_is_said() -> None:
    graph = Cut()
    graph.config.max_builds(3)
    with pytest.raises(
        mg.CaptureError, match=r"has 3 builds and would need another: the length of graph\.recent"
    ) as caught:
        called(graph)
    assert ONE_TENSOR[1] in caught.value.hint


class Logs(mg.Graph):
    """Appends what it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        self.losses.append(loss.item())
        return loss


def test_a_list_is_emptied_without_a_build(caplog: pytest.LogCaptureFixture) -> None:
    graph = Logs()
    for _ in range(3):
        graph(torch.ones(2))
        graph.losses.clear()
    assert len(graph.builds) == 1
    graph(torch.ones(2))
    graph.losses = []
    graph(torch.ones(2))
    assert (len(graph.builds), graph.losses) == (1, [1.0])


class LogsByName(Logs):
    """Has its list in a dict with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {"loss": [], "unit": "nats"}

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        self.logs["loss"].append(loss.item())
        return loss


def test_a_list_is_emptied_where_a_new_one_has_a_build(caplog: pytest.LogCaptureFixture) -> None:
    graph = LogsByName()
    for _ in range(3):
        graph(torch.ones(2))
        graph.logs["loss"] = []
    assert len(graph.builds) == 1
    graph(torch.ones(2))
    graph.logs = {"loss": [], "unit": "nats"}
    graph(torch.ones(2))
    assert len(graph.builds) == 2
    assert "graph.logs['loss'].clear() has none where build() only appends to it" in caplog.text
