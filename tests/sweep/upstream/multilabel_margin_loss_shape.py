"""The fake kernel of multilabel_margin_loss reports another shape for a single sample than the real one gives.

Ends with status 0 as long as the shape in the graph of make_fx is not the one that the graph computes.
"""

import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.multilabel_margin_loss(x, y, reduction="none")


x, y = torch.randn(5), torch.tensor([3, 0, -1, -1, -1])
graph = make_fx(loss, tracing_mode="fake")(x, y)
(returned,) = graph.graph.output_node().args
sys.exit(returned.meta["val"].shape == graph(x, y).shape)
