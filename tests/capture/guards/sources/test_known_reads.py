"""What the graph, its modules and objects hold counts if the step asks for it: by whatever way, and not by its name alone."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import monograph as mg
from monograph.capture.guards.sources.libraries import is_tracing
from tests.support import ROOT

ROUNDS = 5
GRAPHS = ("Graph", "TrainGraph")


@dataclasses.dataclass
class Progress:
    step: int = 0
    epoch: float | None = None
    every: int | None = None
    name: str = "first"


class Loop:
    """The user's own loop, which a graph holds."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.alpha = 1.0

    def next(self, index: int) -> None:
        self.progress.step, self.progress.epoch = index, index / 4
        self.alpha *= 0.5
        self.progress.name = f"step {index}"

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.progress.every is not None and self.progress.step % self.progress.every == 0:
            x = x + (self.progress.epoch or 0)
        return x.square().mean()


class Step(mg.Graph):
    def __init__(self, loop: Loop, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.loop = loop
        self.read = read

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.loop, x)


def runs(read: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[list[float], list[float], int]:
    """What plain Python and a graph give while a loop goes on, and the number of builds."""
    plain, graphed = Loop(), Loop()
    step = Step(graphed, read)
    expected, got = list[float](), list[float]()
    for index in range(1, ROUNDS + 1):
        x = torch.full((3,), float(index))
        expected.append(read(plain, x).item())
        got.append(step(x).item())
        plain.next(index)
        graphed.next(index)
    return expected, got, len(step.builds)


def test_a_number_that_code_names_and_does_not_ask_for_leads_to_no_build() -> None:
    """The names of a branch that is not taken: of a counter, of a float that was None, of a text."""

    def read(loop: Any, x: torch.Tensor) -> torch.Tensor:
        if loop.progress.every is not None and loop.progress.name:
            x = x + loop.alpha
        return loop.loss(x)

    expected, got, builds = runs(read)
    assert expected == got
    assert builds == 1


def _by_copy(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * copy.copy(loop).alpha


def _by_deep_copy(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * copy.deepcopy(loop.progress).step


def _by_replacing(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * dataclasses.replace(loop.progress, name="").step


def _by_getstate(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * loop.__getstate__()["alpha"]


def _by_object(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * object.__getattribute__(loop, "alpha")


def _by_namespace(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * SimpleNamespace(**vars(loop)).alpha


def _by_text(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * len(repr(loop.progress))


def _by_comparison(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * (2 if loop.progress == Progress() else 3)


def _by_items(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * sum(value for value in loop.__dict__.values() if isinstance(value, float))


def _by_name(loop: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum() * getattr(loop, "".join(("al", "pha")))


WAYS = (
    *(_by_copy, _by_deep_copy, _by_replacing, _by_getstate, _by_object, _by_namespace, _by_text),
    *(_by_comparison, _by_items, _by_name),
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("_"))
def test_a_number_that_is_read_counts_whatever_the_way(way: Any) -> None:
    expected, got, _ = runs(way)
    assert expected == got


class LoopModule(Loop, torch.nn.Module):
    """The same as a module of the graph."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        torch.nn.Module.__init__(self)
        Loop.__init__(self)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, x)


class LoopGraph(Loop, mg.Graph):
    """The same as the graph itself."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        mg.Graph.__init__(self)
        Loop.__init__(self)
        self.read = read

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, x)


def _by_the_dict_of_the_class(loop: Any, x: torch.Tensor) -> torch.Tensor:
    home = next(vars(cls) for cls in type(loop).__mro__ if "__dict__" in vars(cls))
    return x.sum() * home["__dict__"].__get__(loop)["alpha"]


@pytest.mark.parametrize(
    "way",
    [_by_object, _by_getstate, _by_items, _by_name, _by_the_dict_of_the_class],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("owner", ["object", "module", "graph"])
def test_a_number_that_is_read_counts_whosesoever_it_is(owner: str, way: Any) -> None:
    loop: Any = {"object": lambda _: Loop(), "module": LoopModule, "graph": LoopGraph}[owner](way)
    step = loop if owner == "graph" else Step(loop, way if owner == "object" else lambda module, x: module(x))
    loop.alpha = 1.0
    got = [step(torch.ones(3)).item()]
    loop.alpha = 5.0
    got.append(step(torch.ones(3)).item())
    assert got[1] == 5 * got[0]


class Branching(torch.nn.Module):
    """A layer that reads in one branch what it does not read in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.scale, self.note = 1.0, "first"
        self.losses: list[float] = []
        self.last: deque[float] = deque(maxlen=2)
        self.table = {"losses": [0.0], "calls": 0}

    def forward(self, x: torch.Tensor, keeps: bool) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        if keeps:
            self.losses.append(loss.item())
            if self.note == "never":
                loss = loss * self.scale + sum(self.last) + sum(self.table["losses"])
        return loss


class Keeping(mg.Graph):
    def __init__(self, model: Branching) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), 0.1))
        self.seen: list[float] = []
        self.verbose, self.unit, self.calls = False, 1.0, 0

    def build(self, x: torch.Tensor, keeps: bool = False) -> torch.Tensor:
        loss: torch.Tensor = self.model(x, keeps)
        loss.backward()
        self.calls += 1
        self.last = loss.detach()
        if hasattr(self, "other"):
            loss = loss * 2
        if keeps:
            self.seen.append(loss.item() * self.unit)
        if self.verbose:
            loss = loss + self.unit + len(self.seen)
        return loss


def test_what_a_branch_that_is_not_taken_reads_leads_to_no_build() -> None:
    """Numbers, lists that grow in some steps only, and those that the script changes: of modules and of the graph."""

    def train(graphed: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Branching()
        step = Keeping(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results, seen = [], list[float]()
        for index in range(12):
            x, keeps = torch.randn(4, 3), index % 3 == 2
            if graphed:
                results.append(step(x, keeps).item())
            else:
                optimizer.zero_grad()
                loss = model(x, keeps)
                loss.backward()
                optimizer.step()
                seen += [loss.item()] * keeps
                results.append(loss.item())
            model.scale += 0.5
            model.last.append(index)
            model.table["losses"].append(0.5)
            model.table["calls"] += 1
        assert len(step.builds) == 2 * graphed
        return results, model.losses, step.seen if graphed else seen

    assert train(True) == train(False)


def test_a_list_that_one_of_two_builds_reads() -> None:
    """The build that does not read it serves each length."""

    class Reading(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.offsets = [1.0]

        def build(self, x: torch.Tensor, reads: bool) -> torch.Tensor:
            return x.sum() + (sum(self.offsets) if reads else 0)

    step = Reading()
    for index in range(8):
        assert step(torch.ones(3), reads=bool(index % 2)) == 3 + sum(step.offsets) * (index % 2)
        if index < 4:
            step.offsets.append(float(index))
    assert len(step.builds) == 1 + 3  # three lengths were read


def test_a_number_that_only_a_hook_in_backward_reads_counts() -> None:
    def read(loop: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = x * 2
        y.register_hook(lambda gradient: gradient * loop.alpha)
        return torch.autograd.grad(y.sum(), x)[0].sum()

    expected, got, _ = runs(read)
    assert expected == got


def test_another_name_for_the_object_reads_the_same_one() -> None:
    aliases: dict[int, Any] = {}

    def read(loop: Any, x: torch.Tensor) -> torch.Tensor:
        other = aliases.setdefault(id(loop), loop.progress)
        return x.sum() * (1 + other.step)

    expected, got, _ = runs(read)
    assert expected == got


class Shared:
    """All objects of this class have the same attributes."""

    attributes: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.attributes


FIRST, SECOND = Shared(), Shared()


def test_objects_that_share_their_attributes_keep_them() -> None:
    def later(x: torch.Tensor) -> torch.Tensor:
        return x * SECOND.scale["by"]

    class Sharing(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            if FIRST.ready and SECOND.ready:
                x = x + 1
            return later(x).sum()

    Shared.attributes.update(ready=True, scale={"by": 2.0})
    step = Sharing()
    got = [step(torch.ones(2)).item()]
    Shared.attributes["scale"] = {"by": 3.0}
    got.append(step(torch.ones(2)).item())
    FIRST.ready = False
    got.append(step(torch.ones(2)).item())
    assert got == [8.0, 12.0, 6.0]
    assert Shared.attributes == {"ready": False, "scale": {"by": 3.0}}


def test_a_number_that_another_kind_takes_over_from_moves_from_then_on() -> None:
    """A position is 0 before the first step, and a float after it."""
    progress = Progress(epoch=0)

    class Positioned(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.progress = progress

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.progress.epoch).sum()

    step = Positioned()
    for index in range(6):
        progress.epoch = index and index / 4
        x = torch.full((2,), float(index))
        assert step(x) == (x * progress.epoch).sum()
    assert len(step.builds) == 2


def test_something_else_in_the_place_of_a_number_that_moves() -> None:
    """A branch on the number cannot be looked at with it."""

    def read(loop: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(loop.alpha, tuple):
            return x.sum() * 9
        return x.sum() * loop.alpha if loop.alpha > 0 else x.sum()

    loop = Loop()
    step = Step(loop, read)
    for value in (1.0, 2.0, 3.0, (), 4.0, -1.0, (), 5.0):
        loop.alpha = value  # type: ignore[assignment]
        assert step(torch.ones(3)) == read(loop, torch.ones(3))
    loop.alpha = "a"  # type: ignore[assignment]
    with pytest.raises(TypeError) as caught:
        step(torch.ones(3))
    assert caught.traceback[-1].path.name == "test_known_reads.py"


def test_the_graphs_of_the_package_are_looked_through_like_those_of_users() -> None:
    """What their code names counts."""
    found = set[str]()
    for path in (ROOT / "monograph").rglob("*.py"):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        bases = {ast.unparse(base) for item in classes for base in item.bases}
        if any(base.rpartition(".")[2] in GRAPHS for base in bases):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert {"monograph.shortcuts", "monograph.integrations.transformers"} <= found
    assert [name for name in found if is_tracing(name)] == []


class Weighted:
    """A loss with a weight, a counter, an average and a list: all that a step may read and write."""

    def __init__(self) -> None:
        self.weight, self.calls = 1.0, 0
        self.average = torch.zeros(())
        self.seen: list[torch.Tensor] = []

    def __call__(self, predictions: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        loss = (predictions - target).square().mean() * self.weight * self.calls
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.seen.append(loss.detach())
        return loss + self.average


class Scaled:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, predictions: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return predictions.detach().sum() * self.by


def test_what_a_loss_object_of_train_graph_reads_and_writes() -> None:
    def train(graphed: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of, outputs = Weighted(), Scaled()
        step = mg.train_graph(model, loss_of, optimizer, outputs=outputs)
        results = []
        for _ in range(6):
            x, y = torch.randn(4, 3), torch.randn(4, 2)
            if graphed:
                loss, output = step(x, y)
            else:
                optimizer.zero_grad()
                predictions = model(x)
                loss = loss_of(predictions, y)
                loss.backward()
                optimizer.step()
                output = outputs(predictions, y)
            results.append((loss.item(), output.item()))
            loss_of.weight *= 0.9
            outputs.by *= 0.8
        seen = [item.item() for item in loss_of.seen]
        assert len(step.builds) == 2 * graphed
        return results, model.weight.tolist(), loss_of.calls, loss_of.average.item(), seen

    assert train(True) == train(False)
