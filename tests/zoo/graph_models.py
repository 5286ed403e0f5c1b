"""Models of torch_geometric, on small random graphs, with the scatter that is written in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import (
    ARMAConv,
    EdgeConv,
    FastRGCNConv,
    FiLMConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    GraphNorm,
    LEConv,
    PNAConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from tests.zoo.model import (
    ADAM_CLIP,
    ADAMW,
    ADAMW_WARMUP,
    SGD,
    SGD_DECAY,
    Batch,
    Training,
    ZooModel,
)

NODES, EDGES, FEATURES, CLASSES, GRAPHS = 12, 30, 6, 3, 3
WIDTH = 8


class TwoLayers(nn.Module):
    """Two graph layers with dropout between them; each node gets a class."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layer(FEATURES, WIDTH), layer(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, *edges: Any) -> torch.Tensor:
        x = F.dropout(self.first(x, *edges).relu(), 0.5, self.training)
        return self.second(x, *edges)


class PerGraph(nn.Module):
    """Layers of one width, and a class for each graph from the mean, the sum and the largest of its nodes."""

    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.start, self.layer, self.norm = nn.Linear(FEATURES, WIDTH), layer(WIDTH), GraphNorm(WIDTH)
        self.head = nn.Linear(3 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(self.start(x), edges), graph, GRAPHS).relu()
        pools = (global_mean_pool, global_add_pool, global_max_pool)
        return self.head(torch.cat([pool(x, graph, GRAPHS) for pool in pools], dim=-1))


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
    )


def edges(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(NODES, (2, EDGES), generator=generator)


def edges_and_loops(generator: torch.Generator) -> torch.Tensor:
    """Each node has an edge to itself: layers that add those ask in Python which are there already."""
    return torch.cat([edges(generator), torch.arange(NODES).expand(2, -1)], dim=1)


def looped_nodes(generator: torch.Generator) -> Batch:
    x, _, labels = labelled_nodes(generator)
    return x, edges_and_loops(generator), labels


def labelled_nodes(generator: torch.Generator) -> Batch:
    """A graph with fresh edges at each step, and a class for each node."""
    x, labels = (
        torch.randn(NODES, FEATURES, generator=generator),
        torch.randint(CLASSES, (NODES,), generator=generator),
    )
    return x, edges(generator), labels


def nodes_with_kinds(generator: torch.Generator) -> Batch:
    x, index, labels = labelled_nodes(generator)
    return x, index, torch.randint(2, (EDGES,), generator=generator), labels


def nodes_with_weights(generator: torch.Generator) -> Batch:
    x, index, labels = labelled_nodes(generator)
    return x, index, torch.randn(EDGES, 4, generator=generator), labels


def labelled_graphs(generator: torch.Generator) -> Batch:
    """Three graphs in one batch: edges stay within each."""
    x, own = (
        torch.randn(NODES, FEATURES, generator=generator),
        torch.randint(NODES // GRAPHS, (2, EDGES), generator=generator),
    )
    graph = torch.arange(NODES) // (NODES // GRAPHS)
    home = torch.randint(GRAPHS, (EDGES,), generator=generator) * (NODES // GRAPHS)
    return x, own + home, graph, torch.randint(CLASSES, (GRAPHS,), generator=generator)


def classes(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


def row(
    name: str,
    make: Callable[[], nn.Module],
    training: Training,
    batch: Callable[[torch.Generator], Batch] = labelled_nodes,
    builds: int = 1,
) -> ZooModel:
    return ZooModel(name, "torch_geometric", make, batch, classes, training, builds)


def layers(layer: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return partial(TwoLayers, partial(layer, **options))


def per_graph(layer: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return partial(PerGraph, layer)


NO_LOOPS = {"add_self_loops": False}
PNA = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification", "attenuation"],
    "deg": torch.tensor([0, 2, 5, 5]),
}
MODELS = [
    row("GCN", layers(GCNConv, **NO_LOOPS), ADAMW_WARMUP, looped_nodes),
    row("GCN/own loops", layers(GCNConv), SGD, builds=2),
    row("GAT/own loops", layers(GATConv, heads=2, concat=False), ADAMW, builds=2),
    row("GAT", layers(GATConv, heads=2, concat=False, dropout=0.2, **NO_LOOPS), ADAMW, looped_nodes),
    row("GATv2", layers(GATv2Conv, heads=2, concat=False, edge_dim=4, **NO_LOOPS), ADAMW, nodes_with_weights),
    row("GraphSAGE", layers(SAGEConv), SGD),
    row("GraphSAGE/max", layers(SAGEConv, aggr="max", normalize=True), SGD),
    row("GIN", lambda: TwoLayers(lambda i, o: GINConv(mlp(i, o), train_eps=True)), ADAMW),
    row("GINE", lambda: TwoLayers(lambda i, o: GINEConv(mlp(i, o), edge_dim=4)), SGD, nodes_with_weights),
    row("PNA", layers(PNAConv, **PNA), ADAM_CLIP),
    row("TransformerConv", layers(TransformerConv, heads=2, concat=False, dropout=0.1, beta=True), ADAMW),
    row("RGCN", layers(FastRGCNConv, num_relations=2, num_bases=2), SGD, nodes_with_kinds),
    row("TAGConv", layers(TAGConv, K=2), SGD),
    row("SGConv", layers(SGConv, K=2, **NO_LOOPS), SGD, looped_nodes),
    row("ARMAConv", layers(ARMAConv, num_stacks=2, num_layers=2, dropout=0.1), ADAMW),
    row("GraphConv", layers(GraphConv), SGD),
    row("LEConv", layers(LEConv), SGD),
    row("FiLMConv", layers(FiLMConv), SGD),
    row("EdgeConv", lambda: TwoLayers(lambda i, o: EdgeConv(mlp(2 * i, o))), ADAMW),
    row(
        "GatedGraphConv", per_graph(lambda width: GatedGraphConv(width, num_layers=2)), ADAMW, labelled_graphs
    ),
    row(
        "GCN with pooling",
        per_graph(lambda width: GCNConv(width, width, **NO_LOOPS)),
        SGD_DECAY,
        labelled_graphs,
    ),
]
