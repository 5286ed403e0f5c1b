"""Indices that a table does not have: eager's error with the user's line, and a step that has not been."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monograph as mg
from monograph.compat.inductor import write_order as _writes_last
from monograph.numerics.judge import differences
from tests.support import new_cache

BACKENDS = ["aten", "inductor"]


class Common(nn.Module):
    """What must not change in a step that fails: running statistics, random numbers, a bank of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.out = nn.Linear(6, 5)
        self.register_buffer("bank", torch.zeros(4, 6))

    def forward(self, embedding: Tensor, gather: Tensor, scatter: Tensor, index_put: Tensor) -> Tensor:
        h = self.words(embedding)
        h = self.drop(self.norm(h))
        h = h + h.gather(1, gather)
        h = h + torch.zeros_like(h).scatter(1, scatter, h[:, :2])
        with torch.no_grad():
            self.bank[index_put] = h.detach()
        return self.out(h)


class Others(nn.Module):
    """More ops that look at values, one of them in a place that the step moves on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5))
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("last", torch.zeros(4, 5))

    def forward(
        self,
        select: Tensor,
        indexing: Tensor,
        scatter_add: Tensor,
        take: Tensor,
        bag: Tensor,
        index_add: Tensor,
        positive: Tensor,
        divisor: Tensor,
        matrix: Tensor,
        probability: Tensor,
        share: Tensor,
        chance: Tensor,
        classes: Tensor,
        repeats: Tensor,
        index_copy: Tensor,
        places: Tensor,
        reduced: Tensor,
        mask: Tensor,
    ) -> Tensor:
        h = self.drop(self.norm(self.table.index_select(0, select) + self.table[indexing]))
        h = h + torch.zeros_like(h).scatter_add(1, scatter_add, h)
        h = h + self.table.take(take)[:, None]
        h = h + F.embedding_bag(bag, self.table)
        h = h + torch.zeros_like(h).index_add(0, index_add, h)
        h = h + (take // divisor)[:, None]
        torch._assert_async((positive > 0).all(), "not positive")
        h = h + torch.linalg.cholesky(matrix).sum()
        h = h + F.binary_cross_entropy(probability, share)
        h = h + torch.bernoulli(chance)
        h = h + F.one_hot(classes, 5)
        h = h + h.repeat_interleave(repeats, 0, output_size=4)
        h = h + torch.zeros_like(h).index_copy(0, index_copy, h)
        h = h + F.pad(F.max_unpool1d(h[None, :, :2], places[None], 2)[0], (0, 1))
        h = h + h.scatter_reduce(0, reduced, h, "amax") + h.scatter_reduce(0, reduced, h, "mean")
        h = h.index_put((mask,), h[:3])
        with torch.no_grad():
            self.last.copy_(self.table[select])
            self.place += 1
        return h + self.table[self.place]


def common(seed: int) -> dict[str, Tensor]:
    """Arguments of a step with Common."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randint(7, (4,), generator=draw),
        "gather": torch.randint(6, (4, 6), generator=draw),
        "scatter": torch.randint(6, (4, 2), generator=draw),
        "index_put": torch.randperm(4, generator=draw),
        "labels": torch.randint(5, (4,), generator=draw),
    }


def others(seed: int) -> dict[str, Tensor]:
    """Arguments of a step with Others."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "select": torch.randint(7, (4,), generator=draw),
        "indexing": torch.randint(7, (4,), generator=draw),
        "scatter_add": torch.randint(5, (4, 5), generator=draw),
        "take": torch.randint(35, (4,), generator=draw),
        "bag": torch.randint(7, (4, 3), generator=draw),
        "index_add": torch.randint(4, (4,), generator=draw),
        "positive": torch.rand(3, generator=draw) + 1,
        "divisor": torch.randint(1, 5, (4,), generator=draw),
        "matrix": torch.eye(3),
        "probability": torch.rand(3, generator=draw),
        "share": torch.rand(3, generator=draw),
        "chance": torch.rand(5, generator=draw),
        "classes": torch.randint(5, (4,), generator=draw),
        "repeats": torch.tensor([2, 0, 1, 1]),
        "index_copy": torch.randperm(4, generator=draw),
        "places": torch.randperm(4, generator=draw)[:2].repeat(4, 1),
        "reduced": torch.randint(4, (4, 5), generator=draw),
        "mask": torch.randperm(4, generator=draw) > 0,
        "labels": torch.randint(5, (4,), generator=draw),
    }


def parts(model: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, always the same."""
    torch.manual_seed(0)
    made = model()
    return made, torch.optim.AdamW(made.parameters(), lr=0.01)


class Train(mg.Graph):
    """The step of a model."""

    def __init__(self, model: type[nn.Module]) -> None:
        super().__init__()
        self.model, optimizer = parts(model)
        self.loss = nn.CrossEntropyLoss(torch.linspace(1, 2, 5))
        self.add_optimizer(optimizer)

    def build(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        loss = self.loss(self.model(**inputs), labels)
        loss.backward()
        return loss


def graph_of(model: type[nn.Module], backend: str) -> mg.Graph:
    """A graph."""
    graph = Train(model)
    graph.config.backend(backend)
    return graph


def eager_error(model: type[nn.Module], batches: list[dict[str, Tensor]]) -> Exception:
    """What plain PyTorch raises in the last of these steps."""
    with torch.random.fork_rng():
        return _eager_error(model, batches)


def _eager_error(model: type[nn.Module], batches: list[dict[str, Tensor]]) -> Exception:
    made, optimizer = parts(model)
    weight = torch.linspace(1, 2, 5)
    for number, inputs in enumerate(batches, 1):
        given = dict(inputs)
        labels = given.pop("labels")
        optimizer.zero_grad()
        try:
            F.cross_entropy(made(**given), labels, weight).backward()
        except Exception as error:
            assert number == len(batches)
            return error
        optimizer.step()
    raise AssertionError("eager mode takes it")


def with_bad(inputs: dict[str, Tensor], name: str, number: int) -> dict[str, Tensor]:
    """The same arguments, one element of one of them wrong in one of five ways."""
    size = {"embedding": 7, "gather": 6, "scatter": 6, "index_put": 4, "labels": 5}[name]
    bad = [size, -size - 1, size + 10, -(2**40), 2**40][number]
    changed = dict(inputs) | {name: inputs[name].clone()}
    changed[name].view(-1)[number % 4] = bad
    return changed


def trained(graph: mg.Graph) -> dict[str, Any]:
    """A copy of what training changes, steps counted."""
    state: dict[str, Any] = copy.deepcopy(graph.state_dict())
    del state["graph.about"]
    return state


def everything(graph: mg.Graph) -> dict[str, Any]:
    """State, gradients and random numbers."""
    gradients = {name: item.grad for name, item in graph.model.named_parameters()}
    return {
        "state": trained(graph),
        "gradients": gradients,
        "random": torch.get_rng_state(),
    }


def fails_as_in_eager(graph: mg.Graph, inputs: dict[str, Tensor], error: Exception, spelled: str) -> None:
    """The call raises the error of eager mode in few lines, with the place of what is spelled so, and changes nothing."""
    before = everything(graph)
    with pytest.raises(type(error)) as raised:
        graph(**inputs)
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    told = "".join(traceback.format_exception(raised.value))
    assert len(told.splitlines()) <= 15, told
    lines = Path(__file__).read_text().splitlines()
    places = [number for number, line in enumerate(lines, 1) if spelled in line]
    assert any(f'"{__file__}", line {number},' in told for number in places), told
    assert not list(differences(before, everything(graph)))


SPELLED = {
    "embedding": "self.words(embedding)",
    "gather": "h.gather(",
    "scatter": ".scatter(1, ",
    "index_put": "self.bank[index_put]",
    "labels": "self.loss(self.model",
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_index_is_as_if_the_step_had_not_been(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    graph, other = graph_of(Common, backend), graph_of(Common, backend)
    torch.manual_seed(1)
    graph(**common(0))
    assert graph.builds[0].backend == backend
    states = [torch.get_rng_state()]
    for step, name in enumerate(SPELLED, 1):
        for number in range(5):
            inputs = with_bad(common(step), name, number)
            torch.set_rng_state(states[-1])
            fails_as_in_eager(graph, inputs, eager_error(Common, [inputs]), SPELLED[name])
        graph(**common(step))
        states.append(torch.get_rng_state())
    torch.manual_seed(1)
    for step in range(len(SPELLED) + 1):
        other(**common(step))
        assert torch.equal(torch.get_rng_state(), states[step])
    assert not list(differences(trained(other), trained(graph)))
    assert len(graph.builds) == 1
    assert "frame #" not in capfd.readouterr().err


WRONG: tuple[tuple[str, Callable[[Tensor], Tensor], str], ...] = (
    ("select", lambda item: item + 7, "index_select(0, select)"),
    ("indexing", lambda item: item - 14, "self.table[indexing]"),
    ("scatter_add", lambda item: item + 5, ".scatter_add("),
    ("take", lambda item: item + 35, ".take(take)"),
    # only one of them: eager mode's threads race to tell what they found
    (
        "bag",
        lambda item: item.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(9)),
        "F.embedding_bag(",
    ),
    ("index_add", lambda item: item + 4, ".index_add("),
    ("select", lambda item: item - 7, "index_select(0, select)"),
    ("index_add", lambda item: item - 4, ".index_add("),
    ("index_copy", lambda item: item - 4, ".index_copy("),
    ("index_copy", lambda item: item + 4, ".index_copy("),
    ("places", lambda item: item - 4, "F.max_unpool1d("),
    ("places", lambda item: item + 4, "F.max_unpool1d("),
    ("reduced", lambda item: item - 1, ".scatter_reduce("),
    ("reduced", lambda item: item + 4, ".scatter_reduce("),
    ("mask", lambda item: item & False, "h.index_put((mask"),
    ("share", lambda item: item + 1, "F.binary_cross_entropy("),
    ("share", lambda item: -item, "F.binary_cross_entropy("),
    ("positive", lambda item: -item, "torch._assert_async("),
    ("divisor", lambda item: item * 0, "take // divisor"),
    ("matrix", lambda item: -item, "torch.linalg.cholesky("),
    ("probability", lambda item: item * float("nan"), "F.binary_cross_entropy("),
    ("chance", lambda item: item + 1, "torch.bernoulli(chance)"),
    ("classes", lambda item: item + 5, "F.one_hot(classes"),
    ("repeats", lambda item: item + 1, "h.repeat_interleave(repeats"),
    ("labels", lambda item: item + 5, "self.loss(self.model"),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whatever_looks_at_values_comes_before_the_first_write(backend: str) -> None:
    graph, other = graph_of(Others, backend), graph_of(Others, backend)
    torch.manual_seed(1)
    graph(**others(0))
    assert graph.builds[0].backend == backend
    for name, wrong, spelled in WRONG:
        good = others(1)
        bad = good | {name: wrong(good[name])}
        fails_as_in_eager(graph, bad, eager_error(Others, [bad]), spelled)
    batches = [others(step) for step in range(7)]
    for inputs in batches[1:6]:
        graph(**inputs)
    state = torch.get_rng_state()
    assert graph.model.place == 6
    fails_as_in_eager(graph, batches[6], eager_error(Others, batches), "self.table[self.place]")
    torch.manual_seed(1)
    for inputs in batches[:6]:
        other(**inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not list(differences(trained(other), trained(graph)))


@pytest.mark.one_case
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "good", "name", "by", "spelled"),
    [
        (Common, common, "labels", 5, SPELLED["labels"]),
        (Common, common, "gather", 6, SPELLED["gather"]),
        (Others, others, "take", 35, "take(take)"),  # with an op that has no C interface
    ],
)
def test_a_bad_index_in_the_very_first_step(
    backend: str,
    model: type[nn.Module],
    good: Callable[[int], dict[str, Tensor]],
    name: str,
    by: int,
    spelled: str,
) -> None:
    graph, other = graph_of(model, backend), graph_of(model, backend)
    torch.manual_seed(1)
    inputs = good(0) | {name: good(0)[name] + by}
    fails_as_in_eager(graph, inputs, eager_error(model, [inputs]), spelled)
    graph(**good(0))
    assert [build.backend for build in graph.builds] == [backend]
    torch.manual_seed(1)
    other(**good(0))
    assert not list(differences(trained(other), trained(graph)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_repeat_is_negative_where_the_size_is_their_sum(backend: str) -> None:
    step = mg.trace(lambda x, repeats: x.repeat_interleave(repeats))
    step.config.backend(backend)
    x = torch.arange(3.0)
    for right in ([0, 1, 1], [2, 0, 0]):
        assert torch.equal(step(x, torch.tensor(right)), x.repeat_interleave(torch.tensor(right)))
    for wrong in ([0, 3, -1], [0, 1, -1], [-1, 1, 2]):
        with pytest.raises(RuntimeError, match="repeats can not be negative"):
            step(x, torch.tensor(wrong))


@pytest.mark.long
def test_a_package_keeps_its_state(tmp_path: Path) -> None:
    graph = graph_of(Common, "inductor")
    graph(**common(0))
    package = mg.load(mg.export_aoti(graph, tmp_path / "step.pt2"), trust=True)
    before = package.state()
    for name in SPELLED:
        with pytest.raises(mg.ArtifactError, match=r"failed: index out of bounds: [^\n]*\n  at"):
            package(**with_bad(common(1), name, 0))
        assert not list(differences(before, package.state()))
    package(**common(1))
    assert list(differences(before, package.state()))


@pytest.mark.long
def test_what_fails_only_in_compiled_code_is_told_in_one_line() -> None:
    graph = graph_of(Common, "inductor")
    graph(**common(0))
    executor = graph.builds[0].executor
    runner = executor._runner

    def fail(inputs: list[Any]) -> Any:
        raise RuntimeError("out of luck\nframe #0: here\nframe #1: there")

    executor._runner = replace(runner, run=fail)
    before = everything(graph)
    with pytest.raises(mg.BackendError, match="before it changed anything: out of luck") as raised:
        graph(**common(1))
    assert not isinstance(raised.value, mg.TornStateError)
    assert "frame" not in str(raised.value)
    assert raised.value.hint
    assert not list(differences(before, everything(graph)))
    executor._runner = runner
    graph(**common(1))


@pytest.mark.long
def test_updates_do_not_wait_for_checks_that_the_forward_has_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    found: list[set[str]] = []
    theirs = _writes_last._failing

    def failing(*args: Any) -> set[str]:
        found.append(theirs(*args))
        return found[-1]

    monkeypatch.setattr(_writes_last, "_failing", failing)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("inductor")
    step(torch.arange(4), torch.arange(4))
    assert [len(names) for names in found] == [2]  # the words and the labels, each once
