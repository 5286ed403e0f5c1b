"""A trace that leaves out what torch's tracer does besides records the same program as one that does it all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import monograph as mg
from monograph.compat import fakes
from monograph.compat.traces import kernels, nodes, tracing
from monograph.ir.meta import origin, value


class Net(nn.Module):
    """Convolutions, norms, views, results that are tuples, numbers, and two weights on one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.cell = nn.LSTMCell(4, 4)
        flat = torch.randn(8, 4)
        self.upper, self.lower = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        self.register_buffer("wide", torch.randn(4, 16).t()[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu_().amax((2, 3))
        for head in self.heads:
            x = head(x).split(2, 1)[0].repeat(1, 2)
        state = self.cell(x)
        x = x.masked_fill(x > 0.5, 2.0).to(torch.float64).float()
        return torch.cat(state, 1) @ self.wide + x @ self.upper + torch.addmm(x, x, self.lower, beta=0.5)


class Step(mg.Graph):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), 0.01))

    def build(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x) * scale, y)
        loss.backward()
        return loss


def _refused(*_: Any, **__: Any) -> Any:
    raise AttributeError("_graph_namespace")


def _create_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    return graph.create_node(op, target, args, kwargs, name=name)


def _constructed(mode: Any, held: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> Any:
    return torch._subclasses.fake_tensor.FakeTensor(mode, held.requires_grad_(requires_grad), device)


WAYS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "nodes": lambda patch: patch.setattr(nodes, "_append", _create_node),
    "arguments": lambda patch: patch.setattr(tracing, "record_directly", lambda _tracer: None),
    "notes": lambda patch: patch.setattr(tracing, "_no_notes", nullcontext),
    "results": lambda patch: patch.setattr(tracing, "results_by_form", nullcontext),
    "fakes": lambda patch: patch.setattr(fakes, "_fake_of_block", lambda *_, **__: None),
    "constructor": lambda patch: [
        patch.setattr(file, "fake_around", _constructed) for file in (fakes, kernels)
    ],
    "examples": lambda patch: patch.setattr(fakes, "shown_example", fakes.example_view),
    "copies": lambda patch: patch.setattr(nodes, "_copier", _refused),
}


def recorded() -> tuple[list[Any], list[torch.Tensor]]:
    """All that the program of a step says, and what three steps leave."""
    torch.manual_seed(0)
    model = Net()
    graph = Step(model)
    batch = torch.randn(5, 3, 6, 6), torch.randint(4, (5,)), 0.5
    losses = [graph(*batch).clone() for _ in range(3)]
    program = graph.builds[-1].program
    said = [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), value(node), origin(node))
        for node in program.graph.nodes
    ]
    return said, [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("way", WAYS)
def test_the_program_is_that_of_torchs_own_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, left = recorded()
    with monkeypatch.context() as patch:
        WAYS[way](patch)
        theirs, left_by_theirs = recorded()
    assert ours == theirs
    assert all(map(torch.equal, left, left_by_theirs))


def test_a_graph_that_keeps_its_names_elsewhere_is_asked_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = nodes.new_input(graph, 0)
    quick = nodes.new_node(graph, torch.ops.aten.add.Tensor, (x, 1.0))
    monkeypatch.delattr(graph, "_find_nodes_lookup_table")
    monkeypatch.setattr(graph, "create_node", lambda op, target, args, kwargs, name: (op, target, args, name))
    assert nodes.new_node(graph, quick.target, (x, 1.0)) == ("call_function", quick.target, (x, 1.0), "add")
    assert nodes.new_input(graph, 1) == ("placeholder", "arg1_1", (), "arg1_1")


def test_fakes_are_those_that_torch_makes() -> None:
    mode = fakes.fake_mode()
    device = torch.device("cpu")
    for requires_grad in (False, True, False):
        made = fakes.fake_around(mode, torch.empty(2, 3, device="meta"), device, requires_grad=requires_grad)
        theirs = _constructed(mode, torch.empty(2, 3, device="meta"), device, requires_grad=requires_grad)
        assert vars(made) == vars(theirs)
        assert torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(theirs)
        assert (made.requires_grad, made.is_leaf, made.shape) == (requires_grad, True, theirs.shape)


def test_what_torch_forgets_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for fakes that was replaced counts, once torch's own cache of results is empty."""
    kernels._KNOWN.results.clear()
    recorded()
    assert kernels._KNOWN.results
    torch._subclasses.fake_tensor.FakeTensorMode.cache_clear()
    kernels._KNOWN.follow(torch._subclasses.fake_tensor)
    assert not kernels._KNOWN.results


def _one(*sizes: int, **options: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(*sizes, **options)


FORMS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "sizes": (_one(4, 6), _one(6, 4)),
    "strides": (_one(4, 4), lambda: torch.ones(4, 4).t()),
    "dtypes": (_one(4), _one(4, dtype=torch.float64)),
    "offsets": (_one(4), lambda: torch.ones(5)[1:]),
    "bits": (_one(4, dtype=torch.complex64), lambda: torch.ones(4, dtype=torch.complex64).conj()),
    "dimensions": (_one(1), lambda: torch.ones(())),
}


@pytest.mark.parametrize("name", FORMS)
def test_results_of_one_form_are_not_those_of_another(name: str) -> None:
    def build(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1, x * 2.5, x.sum(0, keepdim=True) if x.dim() else x.clone(), torch.zeros_like(x)]

    for make in FORMS[name] * 2:
        for ours, theirs in zip(mg.trace(build)(make()), build(make()), strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_results_of_one_number_are_not_those_of_another(number: float) -> None:
    def build(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + number, torch.full_like(x, 2) * number, torch.full((2,), number)]

    x = torch.arange(3)
    for ours, theirs in zip(mg.trace(build)(x), build(x), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype is theirs.dtype
