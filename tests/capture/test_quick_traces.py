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
from monograph.compat.traces import nodes, tracing
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


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nodes": lambda patch: patch.setattr(nodes, "_append", _create_node),
    "arguments": lambda patch: patch.setattr(tracing, "record_directly", lambda _tracer: None),
    "notes": lambda patch: patch.setattr(tracing, "_no_notes", nullcontext),
    "fakes": lambda patch: patch.setattr(fakes, "_fake_of_block", lambda *_, **__: None),
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
