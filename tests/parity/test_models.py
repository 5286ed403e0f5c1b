"""Kinds of models: each trains as a Graph with the bits of the plain loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import ROOT
from tests.support.case import Case, check, sgd

EXAMPLES = ROOT / "examples"


def example(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def regression(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def classification(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def mlp_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.GroupNorm(2, 8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
    )


def conv_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 6, 6, generator=g), torch.randint(0, 4, (4,), generator=g)


def gpt() -> nn.Module:
    return example("models/gpt.py").GPT(17, context=8, width=16, num_layers=2, num_heads=2, dropout=0.1)


def gpt_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 17, (3, 9), generator=g)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last output; the final state takes part in the loss."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(5, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs[:, -1]) + last.mean()


def sequence_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 4, 5, generator=g), torch.randn(3, 2, generator=g)


class Teacher(nn.Module):
    """Two recurrent layers, of which one only gives targets: torch runs it with its inference kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.LSTM(5, 2, batch_first=True), nn.LSTM(5, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted, _ = self.teacher(x)
        return (self.student(x)[0] - wanted)[:, -1]


class Cells(nn.Module):
    """An LSTMCell and a GRUCell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(5, 6), nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
            g = self.gru(h, g)
        return self.head(g)


class Translator(nn.Module):
    """nn.Transformer with embeddings and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(
            8,
            2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=16,
            dropout=0.1,
            batch_first=True,
        )
        self.head = nn.Linear(8, 11)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(
            self.tokens(source), self.tokens(target), tgt_mask=mask, src_key_padding_mask=source == 0
        )
        return self.head(out)


def translation_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    source, target = torch.randint(0, 11, (2, 5), generator=g), torch.randint(0, 11, (2, 5), generator=g)
    return source, target[:, :-1], target[:, 1:]


def translation(model: nn.Module, source: Any, target: Any, following: Any) -> torch.Tensor:
    return F.cross_entropy(model(source, target).transpose(1, 2), following)


class Recommender(nn.Module):
    """Bags of categories, dense features, and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(13, 4, mode="mean")
        self.items = nn.EmbeddingBag(17, 4, mode="sum", padding_idx=0)
        self.best = nn.EmbeddingBag(17, 4, mode="max")
        self.dense = nn.Linear(3, 4)

    def forward(self, users: Any, offsets: Any, items: Any, dense: Any) -> torch.Tensor:
        return (self.users(users, offsets) * (self.items(items) + self.best(items)) * self.dense(dense)).sum(
            1
        )


def recommender_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (
        torch.randint(0, 13, (9,), generator=g),
        torch.tensor([0, 2, 2, 5]),
        torch.randint(0, 17, (4, 3), generator=g),
        torch.randn(4, 3, generator=g),
        torch.randint(0, 2, (4,), generator=g).float(),
    )


def clicks(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])


def pinn() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def heat_equation(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    points = points.clone().requires_grad_(True)
    u = model(points)
    first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0]
    return (first[:, 1] - 0.1 * second[:, 0]).square().mean() + u.square().mean()


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A penalty on the gradient of the loss with regard to the parameters: double backward through them."""
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_scale = self.encoder(x).chunk(2, dim=1)
        posterior = torch.distributions.Normal(mean, log_scale.exp())
        return torch.distributions.Bernoulli(logits=self.decoder(posterior.rsample())), posterior


def evidence(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    likelihood, posterior = model(x)
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    return (
        torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        - likelihood.log_prob(x).sum(1).mean()
    )


class Round(torch.autograd.Function):
    """Rounds forward, passes the gradient where it is small: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1).to(gradient.dtype) * ctx.scale, None


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Round.apply(self.a(x), 4.0))


class Diffusion(nn.Module):
    """Noise drawn in forward at random times, dropout, and a sinusoidal embedding made of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10), persistent=False)
        self.net = nn.Sequential(nn.Linear(6 + 4, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        alpha = self.alphas[t, None]
        angles = t[:, None] * torch.tensor([1.0, 0.1])
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return (self.net(torch.cat([noisy, embedding], dim=1)) - noise).square().mean()


class GraphNetwork(nn.Module):
    """Messages along edges by index_add and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = self.message(x)[edges[0]]
        total = torch.zeros_like(x).index_add(0, edges[1], sent)
        best = torch.zeros_like(x).scatter_reduce(0, edges[1][:, None].expand_as(sent), sent, "amax")
        return self.update(torch.cat([total, best], dim=1))


def expert_routing() -> nn.Module:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
            picked = outputs.gather(1, chosen[..., None].expand(-1, -1, 3))
            return (weights[..., None] * picked).sum(1)

    return Mixture()


def x_only(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 2, (5, 6), generator=g).float(),)


CASES = (
    Case("mlp", mlp, mlp_batch, classification),
    Case("mlp_sgd", mlp, mlp_batch, classification, optimizer=sgd),
    Case("conv_batchnorm_dropout", conv, conv_batch, classification, optimizer=sgd),
    Case("conv_batchnorm_dropout_adamw", conv, conv_batch, classification),
    Case("gpt", gpt, gpt_batch, next_token),
    Case("lstm", lambda: Recurrent(nn.LSTM), sequence_batch, regression),
    Case(
        "lstm_two_layers_dropout",
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5),
        sequence_batch,
        regression,
    ),
    Case("lstm_bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True), sequence_batch, regression),
    Case("gru", lambda: Recurrent(nn.GRU), sequence_batch, regression),
    Case(
        "gru_bidirectional_two_layers_dropout",
        lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3, bidirectional=True),
        sequence_batch,
        regression,
    ),
    Case("rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu"), sequence_batch, regression, optimizer=sgd),
    Case("lstm_under_no_grad", Teacher, sequence_batch, regression),
    Case("recurrent_cells", Cells, sequence_batch, regression),
    Case("transformer", Translator, translation_batch, translation),
    Case("embedding_bag", Recommender, recommender_batch, clicks),
    Case("pinn", pinn, lambda g: (torch.rand(6, 2, generator=g),), heat_equation),
    Case("gradient_penalty", mlp, mlp_batch, penalised),
    Case("vae", VAE, x_only, evidence),
    Case("autograd_function", Rounded, mlp_batch, classification),
    Case("diffusion", Diffusion, x_only, lambda model, x: model(x)),
    Case(
        "graph_network",
        GraphNetwork,
        lambda g: (
            torch.randn(5, 4, generator=g),
            torch.randint(0, 5, (2, 9), generator=g),
            torch.ones(5, 4),
        ),
        lambda model, x, edges, y: F.l1_loss(model(x, edges), y),
    ),
    Case("mixture_of_experts", expert_routing, mlp_batch, classification),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_trains_with_eager_bits(case: Case) -> None:
    check(case)
