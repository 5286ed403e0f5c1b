"""Recurrent layers in a compiled step train as loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.own_ops import RECURRENCE, RECURRENCE_BACKWARD, RECURRENT_LAYER, RECURRENT_LAYER_BACKWARD
from monograph.numerics.judge import against_float64

LAYERS: dict[str, Callable[[int], nn.RNNBase]] = {
    "two layers with dropout": lambda width: nn.LSTM(width, 8, num_layers=2, dropout=0.3, batch_first=True),
    "bidirectional": lambda width: nn.LSTM(width, 8, bidirectional=True),
    "GRU": lambda width: nn.GRU(width, 8),
    "RNN": lambda width: nn.RNN(width, 8),
    "LSTM": lambda width: nn.LSTM(width, 8),
}


class LanguageModel(nn.Module):
    """Scores of the next word for each word, from recurrent layers one after the other."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers, width = nn.ModuleList(), 6
        for name in layers:
            self.layers.append(LAYERS[name](width))
            width = 16 if name == "bidirectional" else 8
        self.head = nn.Linear(width, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits, one row for each word."""
        x = self.embedding(words)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x).flatten(0, 1)


def loss_of(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next words."""
    return nn.functional.cross_entropy(scores, words.flatten())


class Training:
    """A training under AdamW that begins anew from each seed; one graph, if there is one, makes all the steps."""

    def __init__(
        self, layers: Sequence[str], dtype: torch.dtype = torch.float32, backend: str | None = None
    ) -> None:
        self.layers = layers
        self.model = LanguageModel(layers).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.graph = None
        if backend is not None:
            self.graph = mg.train_graph(self.model, loss_of, self.optimizer)
            self.graph.config.backend(backend)

    def trained(self, seed: int) -> list[dict[str, torch.Tensor]]:
        """Parameters, optimizer state and losses after three steps, named by the seed too."""
        torch.manual_seed(seed)
        self.model.load_state_dict(LanguageModel(self.layers).state_dict())
        for entries in self.optimizer.state.values():
            for item in entries.values():
                item.zero_()
        losses = [self.step(*torch.randint(11, (2, 3, 4))).detach() for _ in range(3)]
        moments = {
            f"{index}.{name}": item
            for index, entries in enumerate(self.optimizer.state.values())
            for name, item in entries.items()
        }
        groups = dict(self.model.named_parameters()), moments, dict(enumerate(losses))
        return [{f"{seed}.{name}": item.detach().clone() for name, item in group.items()} for group in groups]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One step and its loss."""
        if self.graph is not None:
            return self.graph(x, y)
        self.optimizer.zero_grad()
        loss = loss_of(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def called(graph: mg.Graph, target: Any) -> int:
    """How often the program that was compiled calls an op."""
    return sum(node.target is target for node in graph.builds[0].stages[-1].program.graph.nodes)


@pytest.mark.long
def test_layers_train_as_near_to_float64_as_eager_does():
    layers = ["two layers with dropout", "bidirectional", "GRU", "RNN"]
    sides = Training(layers, torch.float64), Training(layers), Training(layers, backend="inductor")
    exact, eager, compiled = ([{}, {}, {}] for _ in sides)
    for seed in range(5):
        for groups, side in zip((exact, eager, compiled), sides, strict=True):
            for group, tensors in zip(groups, side.trained(seed), strict=True):
                group |= tensors
    graph = sides[-1].graph
    assert graph.backend == "inductor", graph.builds[0].notes
    assert len(graph.builds) == 1
    assert called(graph, RECURRENCE) == called(graph, RECURRENCE_BACKWARD) == 2 + 2 + 1 + 1
    for exactly, eagerly, ours in zip(exact, eager, compiled, strict=True):
        report = against_float64(exactly, eagerly, ours)
        assert report.ok, (report.eager_rms, report.graph_rms, [d for d in report.distances if not d.ok])


class Scores(mg.Graph):
    """Evaluation: the layer runs without grad mode, and keeps nothing for a backward."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.config.backend("inductor")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        with torch.no_grad():
            return self.model(x)


@pytest.mark.long
def test_a_layer_without_backward_runs_compiled():
    torch.manual_seed(0)
    model, x = LanguageModel(["LSTM"]), torch.randint(11, (3, 4))
    graph = Scores(model)
    scores = graph(x)
    assert graph.backend == "inductor", graph.builds[0].notes
    assert called(graph, RECURRENT_LAYER) == called(graph, RECURRENCE) == 0
    with torch.no_grad():
        report = against_float64({"": model.double()(x)}, {"": model.float()(x)}, {"": scores})
    assert report.ok


@pytest.mark.long
def test_a_step_is_the_same_program_each_time_it_is_captured():
    texts = []
    for _ in range(2):
        training = Training(["bidirectional"], backend="aten")
        training.trained(0)
        texts.append(str(training.graph.builds[0].stages[0].program.graph))
    assert texts[0] == texts[1]


def test_our_ops_are_torchs_in_any_grad_mode():
    torch.manual_seed(0)
    layer, x = nn.LSTM(5, 7), torch.randn(3, 2, 5)
    weights = [item.detach() for item in layer.parameters()]
    state, numbers = torch.zeros(1, 2, 7), (2, 7, 1, True, False)
    with torch.no_grad():
        output, hy, cy, workspace = RECURRENT_LAYER(x, *weights, state, state, False, *numbers, False, True)
        grads = RECURRENT_LAYER_BACKWARD(
            x, *weights, state, state, output, hy, cy, torch.ones_like(output), None, None,
            False, *numbers[:4], True, False, False, workspace,
        )  # fmt: skip
    expected = layer(x.requires_grad_(True))[0]
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(grads[0], x.grad)
    for ours, parameter in zip(grads[1:5], layer.parameters(), strict=True):
        assert torch.equal(ours, parameter.grad)
